"""From a parsed body to a running job and its answer: what the routes share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.generation import GenerationFailed, Job, Mailbox, Piece, check_length, merged, pieces
from jaxserve.pacing import Pace, paced
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.plan import GIVEN_UP
from jaxserve.server.answers import Answer
from jaxserve.server.failures import Refused
from jaxserve.server.metrics import Metrics
from jaxserve.server.objectives import Objectives, objectives_of
from jaxserve.server.openai import ChatBody, CompletionBody, Sampled, check_token, messages_of, params_of, prompts_of
from jaxserve.tokenizer import Tokenizer

T = TypeVar("T")

MAX_OUTPUTS = 1024  # of one HTTP request: prompts times n


class Service:
    """An engine, its tokenizer, and the state of one server. Writer: the server's event loop."""

    def __init__(self, engine: Any, tokenizer: Tokenizer, config: ServeConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config.promising(engine.info.promise.slo)
        self.metrics = Metrics(engine, config.names[0])
        self.draining = False
        self.active = 0  # HTTP requests that generate
        self._mailbox: Mailbox | None = None
        # One thread: tokenizing a long prompt must not stall the streams, and encoding is not reentrant.
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-tokenize")

    def close(self) -> None:
        """Let the tokenizing thread go."""
        self._texts.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run something slow that uses the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served."""
        if name is not None and name not in self.config.names:
            known = ", ".join(map(repr, self.config.names))
            raise Refused(404, f"model {name!r} is not served here; there is {known}", "model", "model_not_found")

    async def prepare(self, body: Sampled, headers: Mapping[str, str], request_id: str) -> Answer:
        """Everything that can be refused is refused here. Raises InvalidValue and Refused."""
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidValue("stream_options has no meaning without stream=true", "stream_options")
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidValue("prompt_logprobs is not supported with stream=true", "prompt_logprobs")
        params = params_of(body, self.engine.info.vocab_size)
        goals = objectives_of(body, headers, self.config)
        goals = goals._replace(pace=goals.pace and bool(body.stream))  # a whole answer is told at its end anyway
        chat = isinstance(body, ChatBody)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{body.request_id or request_id}"
        prompts = await self._prompts(body)
        outputs = len(prompts) * params.n
        if outputs > MAX_OUTPUTS:
            raise InvalidValue(f"prompts times n={params.n} are {outputs} outputs: at most {MAX_OUTPUTS}", "n")
        jobs = [
            self._job(text, tokens, params, goals, name if len(prompts) == 1 else f"{name}-{number}")
            for number, (text, tokens) in enumerate(prompts)
        ]
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
        )

    async def _prompts(self, body: Sampled) -> list[tuple[str | None, list[int]]]:
        """(text where there is one, token ids) of each prompt."""
        if isinstance(body, ChatBody):
            text = await self.off_loop(lambda: self._chat_text(body))
            special = bool(body.add_special_tokens)  # the template has written them
            return [(text, await self.off_loop(lambda: self.tokenizer.encode(text, special)))]
        assert isinstance(body, CompletionBody)
        made: list[tuple[str | None, list[int]]] = []
        special = body.add_special_tokens is not False
        for prompt in prompts_of(body.prompt):
            if isinstance(prompt, str):
                made.append((prompt, await self.off_loop(lambda text=prompt: self.tokenizer.encode(text, special))))  # type: ignore[misc]
            else:
                for token in prompt:
                    check_token(token, self.engine.info.vocab_size, "prompt")
                made.append((None, prompt))
        return made

    def _chat_text(self, body: ChatBody) -> str:
        return self.tokenizer.chat(
            messages_of(body.messages),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            arguments=body.chat_template_kwargs,
        )

    def _job(self, text: str | None, tokens: list[int], params: SamplingParams, goals: Objectives, key: str) -> Job:
        check_length(len(tokens), params, self.engine.info.max_model_len)
        return Job(tokens, params, goals.slo, goals.priority, goals.tier, key, text, goals.pace)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def generate(self, answer: Answer) -> AsyncGenerator[tuple[int, Piece], None]:
        """Run the jobs of an answer. Raises GenerationFailed where the engine gives one up; closing cancels all."""
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        mailbox = self._mailbox
        begun = set[int]()
        streams = [pieces(self.engine, self.tokenizer, job, mailbox) for job in answer.jobs]
        async with aclosing(merged(streams)) as news:
            async for number, piece in news:
                job = answer.jobs[number]
                if number not in begun:
                    begun.add(number)
                    self.metrics.begun(job)
                if piece.finish_reason in GIVEN_UP:
                    raise GenerationFailed(piece.error or "the engine gave the request up", piece.finish_reason)
                self.metrics.news(job, piece)
                yield number, piece

    def _paced(self, answer: Answer) -> AsyncGenerator[tuple[int, Piece], None]:
        """The same, counted as it comes and told at each job's pace. A server that ends waits for no pace."""
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
        """The whole answer."""
        with self._counted():
            async with aclosing(self.generate(answer)) as news:
                async for number, piece in news:
                    answer.add(number, piece)
        return answer.whole()

    async def chunks(self, answer: Answer, body: Sampled) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in chunks."""
        each = body.stream_options is not None and body.stream_options.continuous_usage_stats
        with self._counted():
            source = self._paced(answer) if answer.jobs[0].pace else self.generate(answer)
            async with aclosing(source) as news:
                async for number, piece in news:
                    for chunk in answer.chunks(number, piece):
                        yield {**chunk, "usage": answer.usage} if each else chunk
        if body.wants_usage:
            yield answer.usage_chunk()
