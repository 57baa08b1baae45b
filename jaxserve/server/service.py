"""The path from a parsed body to running requests and their answer, shared by all routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.queue import ROWS
from jaxserve.errors import InvalidValue, short
from jaxserve.generation.generate import GenerationFailed, Mailbox, Piece, Submission, check_length, merged, pieces
from jaxserve.generation.stops import Automaton
from jaxserve.sched.api.plan import GIVEN_UP
from jaxserve.server.answers import Answer
from jaxserve.server.client_metrics import StageCollector
from jaxserve.server.failures import Refused
from jaxserve.server.fairness import Client, Stage
from jaxserve.server.keys import Keys
from jaxserve.server.limits import load_limits
from jaxserve.server.metrics import Metrics
from jaxserve.server.objectives import objectives_of
from jaxserve.server.openai import ChatBody, CompletionBody, Sampled, params_of
from jaxserve.server.pacing import Pace, paced
from jaxserve.server.prompts import Prompts
from jaxserve.tokenizer import Tokenizer

WINDOW = 2  # requests admitted to a shared engine, as a multiple of those it can run at a time


class Service:
    """An engine, its tokenizer, and the state of one server. Writer: the server's event loop."""

    def __init__(self, engine: Any, tokenizer: Tokenizer, config: ServeConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.keys = Keys.of(config)
        # The keys are kept as digests only, in `keys`.
        self.config = replace(config.promising(engine.info.promise.slo), api_key=(), admin_key=())
        self.metrics = Metrics(engine, config.names[0])
        self.limits = limits = load_limits(config, self.keys.names)
        instances, rows = max(1, len(engine.info.instances)), self._rows()
        bound = instances * (config.max_num_queued_reqs or ROWS * rows)
        timeout = config.queue_timeout or None
        self.stage = Stage(limits, self.keys.names, window=WINDOW * instances * rows, bound=bound, timeout=timeout)
        self.metrics.register(StageCollector(self.stage, config.names[0]))
        self.draining = False
        self.ending = asyncio.Event()  # set when a shutdown aborts the running requests
        self.active = 0  # HTTP requests that generate tokens
        self._mailbox: Mailbox | None = None
        self.prompts = Prompts(tokenizer, engine.info.vocab_size, engine.info.max_model_len)

    def close(self) -> None:
        """Stop the tokenizer threads."""
        self.prompts.close()

    def _rows(self) -> int:
        """Return the number of requests that one instance can run at a time."""
        instances = self.engine.info.instances
        platform = instances[0].devices[0].partition(":")[0] if instances and instances[0].devices else "cpu"
        return self.config.rows(platform)

    def check_model(self, name: str | None) -> None:
        """Raise Refused (404) for a model that is not served."""
        if name is not None and name not in self.config.names and name != self.config.model:
            known = ", ".join(map(repr, self.config.names))
            raise Refused(404, f"model {short(name)} is not served here; served: {known}", "model", "model_not_found")

    async def prepare(self, body: Sampled, headers: Mapping[str, str], request_id: str, client: str = "") -> Answer:
        """Validate and tokenize a request, and return its unstarted answer.

        Raises InvalidValue or Refused: every check that can refuse a request is made here.
        """
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidValue("stream_options requires stream=true", "stream_options")
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidValue("prompt_logprobs is not supported with stream=true", "prompt_logprobs")
        self.limits.of(client).check(body)
        params = params_of(body, self.engine.info.vocab_size)
        goals = objectives_of(body, headers, self.config)
        goals = goals._replace(pace=goals.pace and bool(body.stream))  # pacing affects streams only
        chat = isinstance(body, ChatBody)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{body.request_id or request_id}"
        prompts = await self.prompts.of(body, params.n, self.engine.check_outputs)
        stops = await self.prompts.texts.run(lambda: Automaton(params.stop), 0) if params.stop else Automaton(())
        salt = self.keys.salt(client, body.cache_salt)
        jobs = []
        for number, (text, tokens) in enumerate(prompts):
            check_length(len(tokens), params, self.engine.info.max_model_len)
            key = name if len(prompts) == 1 else f"{name}-{number}"
            jobs.append(
                Submission(
                    tokens, params, goals.slo, goals.priority, goals.tier, key, text, goals.pace, stops, salt=salt
                )
            )
        return Answer(
            name,
            body.model or self.config.names[0],
            chat,
            jobs,
            self.tokenizer,
            params.logprobs,
            body.prompt_logprobs is not None,
            echo=isinstance(body, CompletionBody) and body.echo,
            score_only=isinstance(body, CompletionBody) and body.max_tokens == 0,
            service_tier=body.service_tier,
            client=client,
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def generate(self, answer: Answer) -> AsyncGenerator[tuple[int, Piece], None]:
        """Run the submissions of an answer, yielding (index, piece). Closing the generator cancels all of them.

        Raises GenerationFailed if the engine gives a request up.
        """
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        mailbox = self._mailbox
        outputs, tokens = sum(job.params.n for job in answer.jobs), sum(len(job.prompt) for job in answer.jobs)
        arrived = time.monotonic()
        async with self.stage.admitted(answer.client, outputs, tokens) as client:
            waited = time.monotonic() - arrived
            streams = [pieces(self.engine, self.tokenizer, replace(job, waited=waited), mailbox) for job in answer.jobs]
            if len(streams) == 1:
                async with aclosing(streams[0]) as only:
                    async for piece in only:
                        self._count(answer, 0, piece, client)
                        yield 0, piece
            else:
                async with aclosing(merged(streams)) as news:
                    async for number, piece in news:
                        self._count(answer, number, piece, client)
                        yield number, piece

    def _count(self, answer: Answer, number: int, piece: Piece, client: Client) -> None:
        """Count a piece. Raises GenerationFailed at a failed one."""
        job = answer.jobs[number]
        client.use("generation", len(piece.tokens))
        if answer.begin(number):
            self.metrics.begun(job)
        if piece.finish_reason in GIVEN_UP:
            raise GenerationFailed(piece.error or "the engine gave the request up", piece.finish_reason)
        self.metrics.news(job, piece)

    def _paced(self, answer: Answer) -> AsyncGenerator[tuple[int, Piece], None]:
        """Run `generate` and delay its pieces to each request's pace. A draining server does not delay them."""
        markers, paces = self.engine.info.thinking, dict[tuple[int, int], Pace]()

        def due(ready: float, news: tuple[int, Piece]) -> float:
            number, piece = news
            pace = paces.get((number, piece.choice))
            if pace is None:
                job = answer.jobs[number]
                thinking = markers.after(job.prompt) if job.slo.stages else None
                pace = paces[number, piece.choice] = Pace(job.slo, thinking)
            return pace.due(ready, piece.tokens)

        return paced(self.generate(answer), due, hurry=lambda: self.draining, held=self.metrics.held)

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """Run an answer to its end and return the response body."""
        with self._counted():
            async with aclosing(self.generate(answer)) as news:
                async for number, piece in news:
                    answer.add(number, piece)
        return answer.whole()

    async def chunks(self, answer: Answer, body: Sampled) -> AsyncGenerator[dict[str, Any], None]:
        """Run an answer and yield the chunks of its stream."""
        each = body.stream_options is not None and body.stream_options.continuous_usage_stats
        with self._counted():
            source = self._paced(answer) if answer.jobs[0].pace else self.generate(answer)
            async with aclosing(source) as news:
                async for number, piece in news:
                    for chunk in answer.chunks(number, piece):
                        yield {**chunk, "usage": answer.usage} if each else chunk
        if body.wants_usage:
            yield answer.usage_chunk()
