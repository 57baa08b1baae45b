"""The frozen values between scheduler and executor: a StepPlan goes down, a StepResult comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .params import SamplingParams
from .pooling import Sum


class Begin(NamedTuple):
    """What an executor needs to run a request in a slot. Sent with the first span in that slot."""

    params: SamplingParams
    seed: int
    prompt: tuple[int, ...]  # token ids of the prompt; () if no parameter needs the tokens before
    output: tuple[int, ...]  # tokens generated so far (if resumed or migrated); () likewise
    prompt_length: int
    eos: tuple[int, ...]  # ids that must not be sampled before `min_tokens` tokens


class Span(NamedTuple):
    """The work of one request in one step: positions [start, start + length)."""

    request: int
    slot: int  # row of the device-side token carry
    start: int  # first position computed
    length: int  # prompt tokens, or 1, or 1 + drafted
    new_pages: tuple[int, ...] = ()  # allocated since the last span in this slot (all pages on first use or resume)
    tokens: tuple[int, ...] = ()  # () if decoding: the token is already on the device
    draft: int = 0  # tokens to draft
    samples: bool = False  # the span ends at the last known token, so it samples the next one
    begin: Begin | None = None  # set on the first span in a slot


def decoding(request: int, slot: int, start: int) -> Span:
    """Return the span of a request that goes on decoding, without new pages.

    Most spans are of this kind, and `Span(...)` is twice as slow.
    """
    return tuple.__new__(Span, (request, slot, start, 1, (), (), 0, True, None))


LEAST_SHARING = 4  # spans of the smallest group that reads its prefix together


class SharedPrefix(NamedTuple):
    """Spans of a step that begin with the same pages, to be read once for all of them.

    The pages are full, and their KV is computed by earlier steps.
    """

    spans: tuple[int, ...]  # indices in `StepPlan.spans`, at least LEAST_SHARING
    pages: int  # leading pages that they share
    decodes: int  # how many of the spans are running decodes; the others are chunks of prompts


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The spans of one step on one instance. Frozen, so that it can be logged and replayed."""

    step: int
    spans: tuple[Span, ...]
    preemptible: bool = False
    resume: int | None = None  # resume this suspended step instead of starting a new one
    shared: tuple[SharedPrefix, ...] = ()  # each span is in at most one


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one token and of the most likely alternatives, best first."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]


class StepResult(NamedTuple):
    """The outcome of a step.

    `tokens` is aligned with `StepPlan.spans`, with () for spans that sample nothing.
    """

    step: int
    started: float  # seconds, executor's clock
    finished: float
    tokens: tuple[tuple[int, ...], ...]
    failed: Mapping[int, str] = {}  # span index -> why this request alone failed (non-finite logits)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}  # span index -> one entry per sampled token
    # span index -> one entry per prompt position of the span, without the first of the prompt
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}
    # span index -> the sum of its hidden states for "mean", the state of its last token for "last"
    pooled: Mapping[int, Sum] = {}
    ended: Mapping[int, str] = {}  # span index -> why this request cannot go on, though its KV is right
    # indices of spans whose request takes part in no step until what it may sample next is known: `Executor.unheld`
    held: frozenset[int] = frozenset()


class Suspended(NamedTuple):
    """A preempted step that stopped at a segment boundary. A later plan resumes it by number."""

    step: int
    started: float  # seconds, executor's clock: when it last began or resumed
    at: float


UNAVAILABLE = "unavailable"  # its instance does not respond
GIVEN_UP = ("error", "rejected", "refused", UNAVAILABLE, "expired")  # finish reasons without a full answer


class Delta(NamedTuple):
    """New output of one request: tokens, and the finish reason when it ends."""

    request: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop" (EOS or stop id), "length", "abort", or one of GIVEN_UP
    error: str | None = None
    stop_token: int | None = None  # the id that ended it, if `finish_reason` is "stop" by a token id
    pooled: bytes = b""  # with the end of a request with `pooling`: its vector, little-endian float32


def token_delta(request: int, tokens: tuple[int, ...]) -> Delta:
    """Return a Delta with tokens only. Most are of this kind, and `Delta(...)` is twice as slow."""
    return tuple.__new__(Delta, (request, tokens, (), (), None, None, None, b""))


KVBuffer = Any  # opaque outside of the executors
