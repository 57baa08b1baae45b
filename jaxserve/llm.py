"""Generating without a server: `LLM` for scripts and notebooks, `AsyncLLM` for programs with an event loop.

with LLM(mesh="2x1") as llm:
    for output in llm.generate(["Hello", "def main("], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue, QueueFull
from jaxserve.generation import (
    Choice,
    EngineLike,
    Job,
    Mailbox,
    Piece,
    cancel,
    check_length,
    gathered,
    pieces,
    submit,
)
from jaxserve.outputs import CompletionOutput, RequestOutput, logprob_dict
from jaxserve.report.progress import bar
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.plan import Delta
from jaxserve.sched.policy import roles_of
from jaxserve.sched.request import STANDARD
from jaxserve.sched.slo import SLO
from jaxserve.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int]

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Prompt", "RequestOutput"]


class _Base:
    """An engine with a tokenizer in front. Use as a context manager, or call `close`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: Any = None,
        tokenizer_object: Tokenizer | None = None,
        config: ServeConfig | None = None,
        **settings: Any,
    ) -> None:
        """Load and warm up.

        `model` and `settings` are those of ServeConfig by name (`mesh="2x1"`, `policy=…`, `ttft_slo="8s"`, …). A
        ready `config`, `engine` or `tokenizer_object` may be given instead. Raises InvalidValue.
        """
        if config is None:
            settings.setdefault("queue_timeout", 0.0)  # no client waits here that would rather be told to come again
            config = ServeConfig.load(**({} if model is None else {"model": model}), **settings)
        elif model is not None or settings:
            raise InvalidValue(f"config is given, so {', '.join(['model', *settings])} must not be", "config")
        self.config = config
        self.tokenizer = tokenizer_object or Tokenizer.load(
            config.tokenizer or config.model_source, config.revision, config.chat_template
        )
        if engine is None:
            from jaxserve.engine.engine import Engine  # jax only now

            with bar("warming up") as progress:
                engine = Engine.start(config, progress=progress)
        self.engine: Any = engine

    def close(self) -> None:
        """End the engine; what is running is aborted."""
        self.engine.close()

    @property
    def roles(self) -> tuple[str, ...]:
        """What each instance is for at present: `prefill`, `decode` or `mixed`."""
        return tuple(role.value for role in self.engine.roles)

    def set_roles(self, roles: Sequence[str] | Mapping[int, str]) -> tuple[str, ...]:
        """Change what instances are for while they serve: all of them, or some by index. Returns all roles.

        No request is lost. Raises InvalidValue, and changes nothing, where a role is unknown, or nobody would be left
        to prefill or to decode.
        """
        return tuple(role.value for role in self.engine.set_roles(roles_of(roles, len(self.engine.roles))))

    def _job(self, prompt: Prompt, params: SamplingParams, slo: SLO | None, priority: int, tier: str = STANDARD) -> Job:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        limit = self.engine.info.max_model_len
        check_length(len(tokens), _capped(params, limit - len(tokens)), limit)
        return Job(
            tokens, params, slo or self.config.slo, priority, tier, text=prompt if isinstance(prompt, str) else None
        )


def _capped(params: SamplingParams, room: int) -> SamplingParams:
    """Offline, an output may ask for more than fits: it ends with `length` when the context is full."""
    if params.max_tokens is None or params.max_tokens <= room or room < 1:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


class LLM(_Base):
    """Generates for many prompts at once and returns when all are done. Works where an event loop already runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | Sequence[SLO] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for each prompt (a text, or token ids), in order.

        `sampling_params`, `slo` and `priority` are one for all or one per prompt. `use_tqdm` shows a progress bar
        when it takes longer than a moment. A request that fails has `finish_reason` "error" or "unavailable". Raises
        InvalidValue for a prompt that does not fit, before anything runs.
        """
        many = _many(prompts)
        params = _each(sampling_params or SamplingParams(), len(many), "sampling_params")
        slos, priorities = _each(slo, len(many), "slo"), _each(priority, len(many), "priority")
        jobs = [self._job(*given) for given in zip(many, params, slos, priorities, strict=True)]
        with bar("generating") if use_tqdm else nullcontext(_no_bar) as progress:
            return _run(self.engine, self.tokenizer, jobs, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        slo: SLO | Sequence[SLO] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of several."""
        single = bool(messages) and isinstance(messages[0], dict)
        talks = cast(Sequence[Sequence[Message]], [messages] if single else messages)
        texts = [
            self.tokenizer.chat(
                talk,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template=chat_template,
            )
            for talk in talks
        ]
        prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(prompts, sampling_params, slo=slo, priority=priority, use_tqdm=use_tqdm)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs


class AsyncLLM(_Base):
    """Generates for one prompt per call, many at a time, on the caller's event loop."""

    _mailbox: Mailbox | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _open_mailbox(self) -> Mailbox:
        """The mailbox of the loop that runs: a program may have one loop after another."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        priority: int = 0,
        tier: str = STANDARD,
    ) -> AsyncGenerator[RequestOutput, None]:
        """News of the outputs as they come: each RequestOutput holds only what is new since the last.

        Closing the iterator, or cancelling the task that reads it, cancels the request in the engine.
        """
        mailbox = self._open_mailbox()
        job = self._job(prompt, sampling_params or SamplingParams(), slo, priority, tier)
        left = job.params.n
        async with aclosing(pieces(self.engine, self.tokenizer, job, mailbox)) as news:
            async for piece in news:
                left -= piece.finish_reason is not None
                output = _blank(job)
                output.outputs = [CompletionOutput(piece.choice)]
                _add(output, output.outputs[0], piece, self.tokenizer)
                output.finished = left == 0
                yield output

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        priority: int = 0,
        tier: str = STANDARD,
    ) -> RequestOutput:
        """The whole of what comes for one prompt. Cancelling the call cancels the request in the engine."""
        mailbox = self._open_mailbox()
        job = self._job(prompt, sampling_params or SamplingParams(), slo, priority, tier)
        output = _blank(job)
        async with aclosing(pieces(self.engine, self.tokenizer, job, mailbox)) as news:
            async for piece in news:
                _add(output, output.outputs[piece.choice], piece, self.tokenizer)
        output.finished = True
        return output


class _Full(Exception):
    """The engine takes no more for now."""


def _run(
    engine: EngineLike, tokenizer: Tokenizer, jobs: Sequence[Job], progress: Callable[..., None]
) -> list[RequestOutput]:
    """All jobs at once; where the engine's queue is bounded, as many as it takes."""
    outputs = [_blank(job) for job in jobs]
    news: queue.SimpleQueue[tuple[int, Choice, Delta]] = queue.SimpleQueue()
    running: dict[int, list[Choice]] = {}
    waiting = deque(enumerate(jobs))

    def start(number: int, job: Job) -> None:
        try:
            deliver = gathered(job.params, lambda choice, delta: news.put((number, choice, delta)))
            running[number] = submit(engine, tokenizer, job, deliver)
        except QueueFull as error:
            if not running:
                raise  # nothing of ours will make room
            raise _Full from error

    try:
        while waiting or running:
            with suppress(_Full):
                while waiting:
                    start(*waiting[0])
                    waiting.popleft()
            number, choice, delta = news.get()
            if choice.finished or choice not in running.get(number, ()):
                continue
            _add(outputs[number], outputs[number].outputs[choice.index], choice.feed(delta), tokenizer)
            if all(choice.finished for choice in running[number]):
                del running[number]
                outputs[number].finished = True
                progress(len(jobs) - len(waiting) - len(running), len(jobs))
    finally:
        for choices in running.values():
            cancel(engine, choices)
    return outputs


def _blank(job: Job) -> RequestOutput:
    outputs = [CompletionOutput(index) for index in range(job.params.n)]
    return RequestOutput(job.key, job.text, job.prompt, outputs)


def _add(whole: RequestOutput, output: CompletionOutput, piece: Piece, tokenizer: Tokenizer) -> None:
    """Append what is new."""
    output.text += piece.text
    output.token_ids.extend(piece.tokens)
    if piece.logprobs:
        output.logprobs = output.logprobs or []
        output.logprobs.extend(logprob_dict(at, tokenizer) for at in piece.logprobs)
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(at.logprob for at in piece.logprobs)
    if piece.prompt_logprobs:
        whole.prompt_logprobs = whole.prompt_logprobs or [None]  # nothing comes before the first token
        whole.prompt_logprobs.extend(logprob_dict(at, tokenizer) for at in piece.prompt_logprobs)
    if piece.finish_reason is not None:
        output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
        output.error, output.metrics = piece.error, piece.metrics


def _many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) > 0 and all(isinstance(p, int) for p in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _each(given: Any, count: int, name: str) -> list[Any]:
    """One per prompt, from one for all or one for each."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise InvalidValue(f"{name} has {len(given)} entries for {count} prompts: give one, or one per prompt", name)
    return list(given)


def _no_bar(done: float, total: float, note: str = "") -> None:
    """Instead of a progress bar."""
