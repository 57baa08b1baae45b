"""Outputs of generation, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.sched.api.plan import TokenLogprobs
from jaxserve.sched.api.request import Request
from jaxserve.sched.metrics import stage_allowance


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds on the engine's clock; only differences are meaningful."""

    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float | None
    token_times: tuple[float, ...] = ()
    cached: int = 0  # prompt tokens found in the prefix cache
    transferred: float | None = None  # when its KV was on the instance that decodes; None: it was not moved
    predicted: float | None = None  # seconds from arrival to first token, as predicted when it was routed
    allowance: float | None = None  # seconds for the tokens after the first, if stages have objectives of their own

    @classmethod
    def of(cls, request: Request, predicted: float | None = None) -> RequestMetrics:
        times = tuple(request.token_times)
        return cls(
            request.arrival,
            request.scheduled_at,
            request.first_token_at,
            request.finished_at,
            times,
            request.cached,
            request.transferred_at,
            predicted,
            stage_allowance(request),
        )

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at a position; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` outputs of a request, whole or incremental."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # "stop", "length", "abort", or one of sched.plan.GIVEN_UP
    stop_reason: int | str | None = None  # the requested stop token or string that ended the output
    error: str | None = None  # the failure, if finish_reason is one of GIVEN_UP
    metrics: RequestMetrics | None = None
    pooled: bytes = b""  # of a request with `pooling`: its vector, little-endian float32


@dataclass(slots=True)
class RequestOutput:
    """The outputs of one prompt. With `AsyncLLM.stream`, `outputs` has only what is new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def metrics(self) -> RequestMetrics | None:
        """Times of the first output."""
        return self.outputs[0].metrics if self.outputs else None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers in the embedding."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The cosine similarity of two texts."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The result of `LLM.score` for one pair; `prompt_token_ids` are of both texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


class Piecewise(Protocol):
    """Gives the texts of tokens where they stand."""

    def text(self, token: int) -> str: ...
    def add(self, token: int) -> int: ...


def logprob_dicts(positions: Iterable[TokenLogprobs], pieces: Piecewise) -> list[dict[int, Logprob]]:
    """Convert positions to vLLM's form: {token id: Logprob} of the sampled and the best tokens."""
    dicts: list[dict[int, Logprob]] = []
    for at in positions:
        entries = {token: Logprob(logprob, rank, pieces.text(token)) for rank, (token, logprob) in enumerate(at.top, 1)}
        entries[at.token] = Logprob(at.logprob, at.rank, pieces.text(at.token))
        pieces.add(at.token)
        dicts.append(entries)
    return dicts
