"""The path from a parsed body to running requests and their answer, shared by all routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.queue import ROWS
from jaxserve.errors import InvalidValue
from jaxserve.fleet.replicas import Replicas
from jaxserve.fleet.rolling import Rolling
from jaxserve.generation.bad_words import with_bad_words
from jaxserve.generation.generate import GenerationFailed, Mailbox, Piece, Submission, merged, pieces
from jaxserve.generation.sharing import session_of
from jaxserve.generation.stops import thinking_of
from jaxserve.models.source import sampling_defaults
from jaxserve.sched.api.new_request import NewRequest, check_length
from jaxserve.sched.api.plan import GIVEN_UP
from jaxserve.server.answers import Answer
from jaxserve.server.client_metrics import StageCollector
from jaxserve.server.fairness import Client, Stage, arrived_at_start
from jaxserve.server.keys import Keys
from jaxserve.server.limits import load_limits
from jaxserve.server.live import LiveFeed
from jaxserve.server.metrics import Metrics
from jaxserve.server.model_list import check_model
from jaxserve.server.objectives import objectives_of
from jaxserve.server.openai import ChatBody, CompletionBody, M, Sampled, params_of, parse
from jaxserve.server.pacing import Pace, paced
from jaxserve.server.prompts import Prompts
from jaxserve.server.sse import while_connected
from jaxserve.server.structured import compiled, constraint_of
from jaxserve.server.texts import SHORT
from jaxserve.server.tracing import Ended, Trace, Tracing
from jaxserve.structured.compiler import Compiler
from jaxserve.tokenizer import Tokenizer
from jaxserve.tools.definitions import Tools, tools_of
from jaxserve.tools.events import Parser
from jaxserve.tools.families import Parsers
from jaxserve.tools.scan import Automaton
from jaxserve.tools.variables import cites

T = TypeVar("T")

WINDOW = 2  # requests admitted to a shared engine, as a multiple of those it can run at a time


class Service:
    """An engine, its tokenizer, and the state of one server. Writer: the server's event loop."""

    def __init__(self, engine: Any, tokenizer: Tokenizer, config: ServeConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.keys = Keys.of(config)
        # The keys are kept as digests only, in `keys`.
        self.config = replace(config.promising(engine.info.promise.slo), api_key=(), admin_key=())
        self.model = config.names[0]  # of requests that name none
        self.metrics = Metrics(engine, self.model, config.metrics_prefix)
        self.limits = limits = load_limits(config, self.keys.names)
        timeout = config.queue_timeout or None
        window, bound = self._sizes()
        self.stage = Stage(limits, self.keys.names, window=window, bound=bound, timeout=timeout)
        self.metrics.registry.register(StageCollector(self.stage, self.model, config.metrics_prefix))
        self.rolling = Rolling(engine) if isinstance(engine, Replicas) else None
        if isinstance(engine, Replicas):
            engine.members.on_changed = lambda: self.stage.resize(*self._sizes())
        self.tracing = Tracing.of(config)
        self.live = LiveFeed(engine, self.keys, self.model, lambda: self.draining)
        self.draining = False
        self.ending = asyncio.Event()  # set when a shutdown aborts the running requests
        self.active = 0  # HTTP requests that generate tokens
        self._mailbox: Mailbox | None = None
        self.parsers = Parsers.of(config.tool_call_parser, config.reasoning_parser, tokenizer.template_text)
        self.sampling_defaults = sampling_defaults(config)
        self.prompts = Prompts(tokenizer, engine.info.vocab_size, engine.info.max_model_len)
        # An engine in another process compiles for itself; here it is found out whether that will work.
        shared: Compiler | None = getattr(engine, "compiler", None)
        self._own = Compiler(tokenizer.json, engine.info.vocab_size, engine.info.eos) if shared is None else None
        self.compiler: Compiler = self._own or engine.compiler

    def close(self) -> None:
        """Send the traces that are left, stop the tokenizer threads, and a restart of replicas before its next one."""
        self.prompts.texts.close()
        if self._own is not None:
            self._own.close()
        if self.tracing is not None:
            self.tracing.close()
        if self.rolling is not None:
            self.rolling.close()

    def _sizes(self) -> tuple[int, int]:
        """Return the outputs that may be in the engine at a time, and those that may wait."""
        instances = self.engine.info.instances
        platform = instances[0].devices[0].partition(":")[0] if instances and instances[0].devices else "cpu"
        rows, count = self.config.rows(platform), max(1, len(instances))  # rows: of one instance
        return WINDOW * count * rows, count * (self.config.max_num_queued_reqs or ROWS * rows)

    def check_model(self, name: str | None) -> None:
        check_model(self.config, name)

    async def read(self, request: Request, kind: type[M]) -> M:
        """Return the body of a request. Raises InvalidValue as `parse` does."""
        raw = await request.body()
        parsing = self.aside(lambda: parse(raw, kind), len(raw))
        waits = len(raw) > SHORT  # for other texts, while its client may leave
        return await (while_connected(request.receive, parsing, self.ending) if waits else parsing)

    async def aside(self, work: Callable[[], T], size: int) -> T:
        """Run work on a text of so many characters: in a text thread if it would hold the event loop up."""
        return work() if size <= SHORT else await self.prompts.texts.run(work, size)

    async def prepare(self, body: Sampled, headers: Mapping[str, str], request_id: str, client: str = "") -> Answer:
        """Validate and tokenize a request, and return its unstarted answer.

        Raises InvalidValue or Refused: every check that can refuse a request is made here.
        """
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidValue("stream_options requires stream=true", "stream_options")
        limits = self.limits.of(client)
        limits.check(body)
        params = params_of(body, self.engine.info.vocab_size, self.sampling_defaults)
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls) if isinstance(body, ChatBody) else None
        if isinstance(body, ChatBody) and (
            self.parsers.keeps_special(tools) or cites(self.tokenizer.template_text, body.template_arguments)
        ):
            params = replace(params, skip_special_tokens=False)
        if (wanted := constraint_of(body, tools)) is not None:
            params = replace(params, structured_outputs=await compiled(self.compiler, wanted))
        if params.bad_words:
            params = await self.prompts.texts.run(
                partial(with_bad_words, params, self.tokenizer), sum(map(len, params.bad_words))
            )
        goals = objectives_of(body, headers, self.config, limits.tiers)
        goals = goals._replace(pace=goals.pace and bool(body.stream))  # pacing affects streams only
        chat = isinstance(body, ChatBody)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{body.request_id or request_id}"
        prompts = await self.prompts.of(body, params, self.engine.check_outputs)
        stops = await self.prompts.texts.run(lambda: Automaton(params.stop), 0) if params.stop else None
        salt, session = self.keys.salt(client, body.cache_salt), session_of(client, body.session_id, headers)
        jobs = []
        for number, (text, tokens) in enumerate(prompts):
            check_length(len(tokens), self.engine.info.max_model_len, params, "messages" if chat else "prompt")
            key = name if len(prompts) == 1 else f"{name}-{number}"
            thinking = thinking_of(self.parsers.tags, text or "") if chat else None
            request = NewRequest(
                tuple(tokens),
                params,
                goals.slo,
                priority=goals.priority,
                tier=goals.tier,
                key=key,
                salt=salt,
                client=client,
                session=session,
            )
            jobs.append(Submission(request, text, goals.pace, stops, thinking))
        return Answer(
            name,
            body.model or self.model,
            chat,
            jobs,
            self.tokenizer,
            params.logprobs,
            body.prompt_logprobs is not None,
            echo=isinstance(body, CompletionBody) and body.echo,
            score_only=isinstance(body, CompletionBody) and body.max_tokens == 0,
            service_tier=body.service_tier,
            client=client,
            reader=self._reader(tools, jobs[0].text or "") if isinstance(body, ChatBody) else None,
            reasoning=isinstance(body, ChatBody) and body.include_reasoning,
            custom=() if tools is None else tools.custom,
            trace=self.trace_of(headers, name),
            objectives=goals.own,
        )

    def trace_of(self, headers: Mapping[str, str], name: str) -> Trace | None:
        """Return the trace of the request called `name`; None without traces."""
        return None if self.tracing is None else self.tracing.begin(headers, name, self.model)

    def _reader(self, tools: Tools | None, prompt: str) -> Callable[[], Parser] | None:
        """Return what makes a parser for each output; None if its text is the answer."""
        return partial(self.parsers.start, tools, prompt) if self.parsers.reads(tools) else None

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
        outputs, tokens = (
            sum(job.request.params.n for job in answer.jobs),
            sum(len(job.request.prompt) for job in answer.jobs),
        )
        arrived = arrived_at_start.get() or time.monotonic()
        async with self._traced(answer), self.stage.admitted(answer.client, outputs, tokens) as client:
            waited = time.monotonic() - arrived
            jobs = [replace(job, request=replace(job.request, waited=waited)) for job in answer.jobs]
            streams = [pieces(self.engine, self.tokenizer, job, mailbox) for job in jobs]
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

    @asynccontextmanager
    async def _traced(self, answer: Answer) -> AsyncIterator[None]:
        """Trace what is generated within the context, however it ends."""
        begun, error = time.time_ns(), None
        since = time.monotonic_ns()  # the time of day may be set meanwhile
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError):
            error = "the client has left"
            raise
        except Exception as failure:
            error = str(failure)
            raise
        finally:
            if self.tracing is not None and answer.trace is not None:
                self.tracing.export(answer.trace, begun, begun + time.monotonic_ns() - since, error)

    def _count(self, answer: Answer, number: int, piece: Piece, client: Client) -> None:
        """Count a piece. Raises GenerationFailed at a failed one."""
        job = answer.jobs[number]
        client.use("generation", len(piece.tokens))
        if answer.begin(number):
            self.metrics.begun(job)
        if answer.trace is not None and piece.metrics is not None:
            answer.trace.ended.append(Ended(number, piece.choice, job, piece.metrics, piece.finish_reason))
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
                thinking = markers.after(job.request.prompt) if job.request.slo.stages else None
                pace = paces[number, piece.choice] = Pace(job.request.slo, thinking)
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
        each = body.stream_options is not None and body.wants_usage and body.stream_options.continuous_usage_stats
        with self._counted():
            source = self._paced(answer) if answer.jobs[0].pace else self.generate(answer)
            async with aclosing(source) as news:
                async for number, piece in news:
                    for chunk in answer.chunks(number, piece):
                        yield {**chunk, "usage": answer.usage} if each else chunk
        if body.wants_usage:
            yield answer.usage_chunk()
