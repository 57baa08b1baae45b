"""Many prompts at once, for `LLM`: jobs are run as the queue has room, and outputs put together from pieces."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from jaxserve.errors import QueueFull
from jaxserve.generation.detokenize import end_of
from jaxserve.generation.generate import Choice, EngineLike, Piece, Submission, cancel, gathered, submit_all
from jaxserve.generation.pieces import Pieces
from jaxserve.outputs import CompletionOutput, RequestOutput, logprob_dicts
from jaxserve.sched.api.plan import Delta
from jaxserve.tokenizer import Tokenizer


class Counters(Protocol):
    """The part of the metrics that a batch needs."""

    def begun(self, job: Submission) -> None: ...
    def news(self, job: Submission, piece: Piece) -> None: ...


def no_bar(done: float, total: float, note: str = "") -> None:
    """Replace the progress bar with nothing."""


class _Full(Exception):
    """The engine accepts no more requests for now."""


def run_batch(
    engine: EngineLike,
    tokenizer: Tokenizer,
    jobs: Sequence[Submission],
    progress: Callable[..., None],
    metrics: Counters,
) -> list[RequestOutput]:
    """Run all jobs, as many at a time as the engine's queue accepts."""
    outputs = [blank_output(job) for job in jobs]
    names = [Names(job, tokenizer) for job in jobs]
    news: queue.SimpleQueue[tuple[int, Choice, Delta]] = queue.SimpleQueue()
    running: dict[int, list[Choice]] = {}
    waiting = deque(enumerate(jobs))

    def start(number: int, job: Submission) -> None:
        try:
            deliver = gathered(job.request.params, lambda choice, delta: news.put((number, choice, delta)))
            running[number] = submit_all(engine, tokenizer, job, deliver)
            metrics.begun(job)
        except QueueFull as error:
            if not running:
                raise  # none of these jobs will free a place in the queue
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
            piece = choice.feed(delta)
            metrics.news(jobs[number], piece)
            add_piece(outputs[number], outputs[number].outputs[choice.index], piece, names[number])
            if all(choice.finished for choice in running[number]):
                del running[number]
                outputs[number].finished = True
                progress(len(jobs) - len(waiting) - len(running), len(jobs))
    finally:
        for choices in running.values():
            cancel(engine, choices)
    return outputs


def blank_output(job: Submission) -> RequestOutput:
    """Return the output of a job before its first piece."""
    outputs = [CompletionOutput(index) for index in range(job.request.params.n)]
    return RequestOutput(job.request.key, job.text, list(job.request.prompt), outputs)


class Names:
    """The texts of a job's tokens for its log-probabilities, if it asks for some. Writer: the reader of its pieces."""

    def __init__(self, job: Submission, tokenizer: Tokenizer) -> None:
        prompt, params = job.request.prompt, job.request.params
        self.prompt = None if params.prompt_logprobs is None else Pieces(tokenizer, False, prompt[:1])
        self.outputs: list[Pieces] = []
        if params.logprobs is not None:
            skip = params.skip_special_tokens
            before = end_of(tokenizer, reversed(prompt), skip)  # once for all outputs
            self.outputs = [Pieces(tokenizer, skip, reversed(before)) for _ in range(params.n)]


def add_piece(whole: RequestOutput, output: CompletionOutput, piece: Piece, names: Names) -> None:
    """Append a piece to an output of a job."""
    output.text += piece.text
    output.token_ids.extend(piece.tokens)
    if piece.logprobs:
        output.logprobs = output.logprobs or []
        output.logprobs.extend(logprob_dicts(piece.logprobs, names.outputs[piece.choice]))
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(at.logprob for at in piece.logprobs)
    if piece.prompt_logprobs and names.prompt is not None:
        whole.prompt_logprobs = whole.prompt_logprobs or [None]  # the first token has no log-probability
        whole.prompt_logprobs.extend(logprob_dicts(piece.prompt_logprobs, names.prompt))
    if piece.finish_reason is not None:
        output.pooled = piece.pooled
        output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
        output.error, output.metrics = piece.error, piece.metrics


def snapshot(whole: RequestOutput) -> RequestOutput:
    """Copy the growing parts, so that a yielded output does not change later."""
    outputs = [
        replace(
            output,
            token_ids=list(output.token_ids),
            logprobs=None if output.logprobs is None else list(output.logprobs),
        )
        for output in whole.outputs
    ]
    return replace(whole, outputs=outputs)
