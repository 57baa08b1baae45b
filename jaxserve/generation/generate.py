"""Generation of text from a prompt, shared by the server and `LLM`.

The engine handles single requests and tokens in its own thread. Here a submission may have n
outputs, tokens become text up to a stop string, and deltas move to the caller's thread or loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

from jaxserve.errors import JaxserveError
from jaxserve.generation.detokenize import TextStream, end_of
from jaxserve.generation.stops import Thinking
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta, TokenLogprobs
from jaxserve.tokenizer import Tokenizer
from jaxserve.tools.scan import Automaton

TOGETHER = 16  # outputs of a job that are submitted before other work of the loop goes on


class EngineLike(Protocol):
    """The part of `Engine` that generation needs."""

    @property
    def info(self) -> Any: ...
    def submit(self, new: NewRequest, on_delta: Callable[[Delta], None]) -> int: ...
    def check_outputs(self, prompts: int, n: int) -> None: ...
    def cancel(self, request: int, reason: str = "abort") -> None: ...
    def record(self, request: int) -> RequestMetrics | None: ...
    def refusal(self, request: int) -> JaxserveError | None: ...


@dataclass(frozen=True)
class Submission:
    """A request for `params.n` outputs, and how they are read."""

    request: NewRequest
    text: str | None = None  # the original prompt, if it was text
    pace: bool = False  # one piece per token, for token pacing
    stops: Automaton | None = None  # of `params.stop`; None: built by `submit`, if there are some
    thinking: Thinking | None = None  # how the outputs think; None: all of their text is the answer


class Piece(NamedTuple):
    """An update of one output."""

    choice: int  # index of the output
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None  # in the last piece
    thought: int = 0  # how many tokens of the output so far are thinking
    pooled: bytes = b""  # in the last piece of a request with `pooling`: its vector, little-endian float32


class GenerationFailed(JaxserveError):
    """The engine could not finish a request; `reason` is `error` or `rejected`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Choice:
    """One output of a submission. Writer: the thread that reads its deltas."""

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        job: Submission,
        index: int,
        before: Sequence[int] | None = None,
    ) -> None:
        """before: the end of the prompt, if the outputs of a job share it; see `end_of`."""
        self.index = index
        self.request = -1  # set by `submit`
        self.finished = False
        self.count = 0  # tokens of the output
        self.thought = 0  # those that are thinking
        self._engine = engine
        self._params = params = job.request.params
        prompt = job.request.prompt if before is None else before
        self._stream = TextStream(tokenizer, params, job.stops, prompt, job.thinking)
        self._stop: str | None = None

    def feed(self, delta: Delta) -> Piece:
        """Convert a delta to a piece.

        After a stop string only the end follows, once the engine has released the request.
        """
        final, text, used = delta.finish_reason is not None, "", 0
        if self._stop is None:
            gain = self._stream.add(delta.tokens, final=final, stop_token=delta.stop_token)
            text, used, self.thought = gain.text, gain.used, gain.thought
            self.count += used
            if gain.stop is not None:
                self._stop = gain.stop
                if not final:
                    self._engine.cancel(self.request, "stop")
        piece = Piece(
            self.index,
            text,
            delta.tokens[:used],
            delta.logprobs[:used],
            delta.prompt_logprobs,
            thought=self.thought,
        )
        return self._end(piece, delta) if final else piece

    def _end(self, piece: Piece, delta: Delta) -> Piece:
        self.finished = True
        metrics = self._engine.record(self.request)
        if metrics is not None:
            metrics = replace(metrics, token_times=metrics.token_times[: self.count])
        reason, stop = delta.finish_reason, None
        if self._stop is not None:
            reason, stop = "stop", self._stop
        token = delta.stop_token if delta.stop_token in self._params.stop_token_ids else None
        return piece._replace(
            finish_reason=reason,
            stop_reason=stop if stop is not None else token,
            error=delta.error,
            metrics=metrics,
            pooled=delta.pooled,
        )


def gathered(params: SamplingParams, deliver: Callable[[Choice, Delta], None]) -> Callable[[Choice, Delta], None]:
    """Wrap `deliver` to be called once per output, with everything, if no stop string can end it.

    For callers that do not stream: the text is then decoded once, not after every token.
    """
    if params.stop:
        return deliver
    parts: dict[int, list[Delta]] = {}

    def gather(choice: Choice, delta: Delta) -> None:
        held = parts.setdefault(choice.index, [])
        held.append(delta)
        if delta.finish_reason is not None:
            deliver(choice, joined(held))

    return gather


def submit(
    engine: EngineLike, tokenizer: Tokenizer, job: Submission, deliver: Callable[[Choice, Delta], None]
) -> Iterator[Choice]:
    """Submit the n requests of a job, one at each turn; `deliver` is called in the engine's thread.

    Output i samples with seed + i. Only the first output computes the prompt's log-probabilities.
    """
    new, params = job.request, job.request.params
    if params.stop and job.stops is None:
        job = replace(job, stops=Automaton(params.stop))  # shared by all outputs
    before = None if params.n == 1 else end_of(tokenizer, reversed(new.prompt), params.skip_special_tokens)  # once
    for index in range(params.n):
        choice = Choice(engine, tokenizer, job, index, before)
        seed = None if params.seed is None else params.seed + index
        own = params.of_output(seed, params.prompt_logprobs if index == 0 else None)
        key = new.key if params.n == 1 else f"{new.key}-{index}"
        choice.request = engine.submit(
            replace(new, params=own, key=key),  # one prompt, however many outputs
            lambda delta, choice=choice: deliver(choice, delta),  # type: ignore[misc]
        )
        yield choice


def submit_all(
    engine: EngineLike, tokenizer: Tokenizer, job: Submission, deliver: Callable[[Choice, Delta], None]
) -> list[Choice]:
    """Submit all requests of a job. If one is refused, those before it are cancelled."""
    choices: list[Choice] = []
    try:
        choices.extend(submit(engine, tokenizer, job, deliver))
    except BaseException:
        cancel(engine, choices)
        raise
    return choices


def cancel(engine: EngineLike, choices: Sequence[Choice]) -> None:
    """Cancel the outputs that have not ended."""
    for choice in choices:
        if not choice.finished:
            engine.cancel(choice.request, "abort")


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join the deltas of one output, in order."""
    return deltas[-1]._replace(
        tokens=tuple(chain.from_iterable(delta.tokens for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt_logprobs=tuple(chain.from_iterable(delta.prompt_logprobs for delta in deltas)),
    )


class Unread:
    """The deltas of a job that its reader has not taken yet. Writer: the reader's event loop."""

    __slots__ = ("_items", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: list[tuple[Choice, Delta]] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: tuple[Choice, Delta]) -> None:
        """Add a delta and wake the reader."""
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[tuple[Choice, Delta]]:
        """Wait for deltas and return all that there are, those of one output joined."""
        if not self._items:
            self._waiting = self._loop.create_future()
            await self._waiting
        items, self._items = self._items, []
        return items if len(items) == 1 else by_choice(items)


def by_choice(items: Sequence[tuple[Choice, Delta]]) -> list[tuple[Choice, Delta]]:
    """Join the deltas of each output but its end, so that a reader that falls behind has less to do per token."""
    grouped: dict[Choice, list[Delta]] = {}
    ends = []
    for choice, delta in items:
        if delta.finish_reason is None:
            grouped.setdefault(choice, []).append(delta)
        else:
            ends.append((choice, delta))
    return [*((choice, joined(deltas)) for choice, deltas in grouped.items()), *ends]


class Mailbox:
    """A channel from the engine's thread to an event loop, with one wake-up per step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[tuple[Unread, tuple[Choice, Delta]]] = deque()
        self._called = False

    def post(self, unread: Unread, item: tuple[Choice, Delta]) -> None:
        """Put an item where a reader of the loop finds it; called from any thread. Dropped if the loop is closed."""
        self._items.append((unread, item))
        if not self._called:
            self._called = True
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._called = False  # before reading, so that an item posted from now on wakes the loop again
        while self._items:
            unread, item = self._items.popleft()
            unread.put(item)


async def pieces(
    engine: EngineLike, tokenizer: Tokenizer, job: Submission, mailbox: Mailbox
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of a job's outputs. Closing the iterator or cancelling its task cancels the job.

    Raises what the engine answers to a request that it does not accept.
    """
    unread = Unread(mailbox.loop)
    choices: list[Choice] = []
    try:
        for choice in submit(engine, tokenizer, job, lambda choice, delta: mailbox.post(unread, (choice, delta))):
            choices.append(choice)
            if len(choices) % TOGETHER == 0:
                await asyncio.sleep(0)  # other streams go on
        open_ = len(choices)
        while open_:
            for choice, delta in await unread.take():
                if choice.finished:
                    continue
                if delta.finish_reason == "rejected" and (error := engine.refusal(choice.request)) is not None:
                    raise error
                for part in _each_token(delta) if job.pace else (delta,):
                    piece = choice.feed(part)
                    open_ -= choice.finished
                    yield piece
    finally:
        cancel(engine, choices)


def _each_token(delta: Delta) -> list[Delta]:
    """Split a delta into one per token.

    The first has the prompt's log-probabilities, the last has the finish reason.
    """
    if len(delta.tokens) < 2:
        return [delta]
    deltas = [Delta(delta.request, (token,), delta.logprobs[at : at + 1]) for at, token in enumerate(delta.tokens)]
    deltas[0] = deltas[0]._replace(prompt_logprobs=delta.prompt_logprobs)
    deltas[-1] = delta._replace(tokens=deltas[-1].tokens, logprobs=deltas[-1].logprobs, prompt_logprobs=())
    return deltas


async def merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Merge streams, with the index of its stream for each piece; an error in one ends all."""
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(stream) as own:
                async for piece in own:
                    queue.put_nowait((number, piece))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        open_ = len(tasks)
        while open_:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_ -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
