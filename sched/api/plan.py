"""The frozen values that cross the seam: a StepPlan goes to the executor, a StepResult comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .params import SamplingParams


class Begin(NamedTuple):
    """What an executor must know of a request before it can run in a slot; sent with the slot's first span."""

    params: SamplingParams
    seed: int
    prompt: tuple[int, ...]  # token ids of the prompt; () where the params need no token history
    output: tuple[int, ...]  # tokens generated so far (a resumed or migrated request); () likewise
    prompt_length: int
    eos: tuple[int, ...]  # ids that may not be sampled before `min_tokens` tokens are out


class Span(NamedTuple):
    """All of one request's work in one step: positions [start, start + length)."""

    request: int
    slot: int  # row of the device-side token carry
    start: int  # first position computed
    length: int  # prompt tokens, or 1, or 1 + drafted
    new_pages: tuple[int, ...] = ()  # gained since the slot's last span (all of them on first use or resume)
    tokens: tuple[int, ...] = ()  # () for decode: the token is already on the device
    draft: int = 0  # speculation length for this span
    samples: bool = False  # the span ends at the last known token, so a token comes out
    begin: Begin | None = None  # set on the slot's first span


def decoding(request: int, slot: int, start: int) -> Span:
    """The span of a row that decodes as in the step before. Most spans are such: Span(...) takes twice as long."""
    return tuple.__new__(Span, (request, slot, start, 1, (), (), 0, True, None))


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    spans: tuple[Span, ...]
    preemptible: bool = False
    resume: int | None = None  # continue this suspended step instead of starting one


class TokenLogprobs(NamedTuple):
    """Log-probability of one token and of the best alternatives, best first."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]


class StepResult(NamedTuple):
    """Outcome of a step. `tokens` is aligned with `StepPlan.spans`; () where a span sampled nothing."""

    step: int
    started: float  # seconds, executor's clock
    finished: float
    tokens: tuple[tuple[int, ...], ...]
    failed: Mapping[int, str] = {}  # span index -> why this row alone failed (non-finite logits)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}  # span index -> one per sampled token
    # span index -> one per prompt position of the span after the first of the prompt, in order
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}


class Suspended(NamedTuple):
    """A preempted step that stopped at a segment boundary; a later plan resumes it by number."""

    step: int
    started: float  # seconds, executor's clock: of this stretch of it
    at: float


UNAVAILABLE = "unavailable"  # what would have served it does not respond
GIVEN_UP = ("error", "rejected", "refused", UNAVAILABLE, "expired")  # reasons of requests that are not answered


class Delta(NamedTuple):
    """News of one request: tokens gained, and at the end why it finished."""

    request: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop" (EOS or stop id), "length", "abort", or one of GIVEN_UP
    error: str | None = None
    stop_token: int | None = None  # the id that ended it, where finish_reason is "stop" by a token


def token_delta(request: int, tokens: tuple[int, ...]) -> Delta:
    """Tokens, and nothing else to tell: most news are such, and Delta(...) takes twice as long."""
    return tuple.__new__(Delta, (request, tokens, (), (), None, None, None))


KvParcel = Any  # opaque outside the executors that make and take it
