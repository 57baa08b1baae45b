"""From jobs to whole outputs: runs a batch to its end, and assembles outputs from pieces."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxserve.errors import QueueFull
from jaxserve.generation import Choice, EngineLike, Job, Piece, cancel, gathered, submit
from jaxserve.outputs import CompletionOutput, RequestOutput, logprob_dict
from jaxserve.sched.api.plan import Delta
from jaxserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.server.metrics import Metrics


class _Full(Exception):
    """The engine takes no more for now."""


def run_batch(
    engine: EngineLike, tokenizer: Tokenizer, jobs: Sequence[Job], progress: Callable[..., None], metrics: Metrics
) -> list[RequestOutput]:
    """Run all jobs at once; where the engine's queue is bounded, as many as it takes."""
    outputs = [blank_output(job) for job in jobs]
    news: queue.SimpleQueue[tuple[int, Choice, Delta]] = queue.SimpleQueue()
    running: dict[int, list[Choice]] = {}
    waiting = deque(enumerate(jobs))

    def start(number: int, job: Job) -> None:
        try:
            deliver = gathered(job.params, lambda choice, delta: news.put((number, choice, delta)))
            running[number] = submit(engine, tokenizer, job, deliver)
            metrics.begun(job)
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
            piece = choice.feed(delta)
            metrics.news(jobs[number], piece)
            add_piece(outputs[number], outputs[number].outputs[choice.index], piece, tokenizer)
            if all(choice.finished for choice in running[number]):
                del running[number]
                outputs[number].finished = True
                progress(len(jobs) - len(waiting) - len(running), len(jobs))
    finally:
        for choices in running.values():
            cancel(engine, choices)
    return outputs


def blank_output(job: Job) -> RequestOutput:
    """Return the output of a job before its first piece."""
    outputs = [CompletionOutput(index) for index in range(job.params.n)]
    return RequestOutput(job.key, job.text, job.prompt, outputs)


def add_piece(whole: RequestOutput, output: CompletionOutput, piece: Piece, tokenizer: Tokenizer) -> None:
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


def snapshot(whole: RequestOutput) -> RequestOutput:
    """Copy what grows, so that an output stays what it was when it was yielded."""
    outputs = [
        replace(one, token_ids=list(one.token_ids), logprobs=None if one.logprobs is None else list(one.logprobs))
        for one in whole.outputs
    ]
    return replace(whole, outputs=outputs)
