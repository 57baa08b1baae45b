"""The least work of a request: seconds that no policy can avoid, from lengths and a step-time model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from ...api.errors import InvalidValue
from ...api.perf import Array
from ...api.policy import Order
from ...perf.model import Coefficients
from ..workload import Arrival

GRACE = 1e-7  # seconds: covers the tolerance of metrics, and rounding of sums


class Details(NamedTuple):
    """Further limits of a policy.

    rows, draft: as in policy.Limits. kv_tokens: capacity of an instance's pool; outputs that do not fit are
    cut. prefix_caching: if False, prompts share no computed prefixes. skip: requests at each end that are
    neither counted nor have to be served.
    """

    rows: int = 256
    draft: int = 0
    kv_tokens: int | None = None
    prefix_caching: bool = True
    skip: int = 0


def check_goal(goal: float) -> None:
    """Check that a goal is a share of requests. Raises InvalidValue."""
    if not 0 < goal <= 1:
        raise InvalidValue(f"{goal=} must be more than 0 and at most 1", "goal")


@dataclass(frozen=True, slots=True)
class Server:
    """One instance: its step times, and the most tokens and rows that a step can hold."""

    coefficients: Coefficients
    tokens: int
    rows: int
    draft: int
    kv_tokens: int | None

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("rows", 1), ("draft", 0), ("kv_tokens", 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise InvalidValue(f"{name}={value!r} must be {least} or more", name)

    def overhead(self, tokens: float) -> float:
        """Return the seconds of a step that do not depend on which requests its tokens belong to. Concave."""
        coefficients = self.coefficients
        return float(coefficients.fixed + coefficients.w_moe * (1.0 - (1.0 - coefficients.p_moe) ** tokens))


@dataclass(frozen=True, slots=True)
class Jobs:
    """Columns with one row per request, in seconds and tokens.

    The first token is due `ttft` after the arrival, the last one `span` after it. A prompt has `length`
    tokens, of which at least `fresh` are not in a prefix cache. After the first token come `outputs` more, in
    at least `steps` steps, which attend to `attended` tokens. `prompt` and `decode` are marginal seconds,
    without overhead and contexts. `alone` and `alone_decoding` are the least times of prompt and outputs if
    nothing else runs.
    """

    arrival: Array
    ttft: Array
    span: Array
    length: Array
    fresh: Array
    prompt: Array
    outputs: Array
    steps: Array
    attended: Array
    decode: Array
    alone: Array
    alone_decoding: Array

    def __len__(self) -> int:
        return len(self.arrival)

    def take(self, keep: Order) -> Jobs:
        return Jobs(*(getattr(self, name)[keep] for name in self.__slots__))

    @property
    def possible(self) -> Order:
        """The requests that would attain their SLO on a server of their own."""
        return np.flatnonzero((self.alone <= self.ttft) & (self.alone_decoding <= self.span - self.ttft))


def jobs(arrivals: Sequence[Arrival], server: Server, *, prefix_caching: bool = True) -> Jobs:
    """Compute the least work of requests, in order of arrival.

    The steps of one request are sequential. So a prompt alone takes at least its full chunks and a rest,
    and the outputs take at least one step per 1 + draft tokens.
    """
    ordered = sorted(arrivals, key=lambda arrival: arrival.time)
    cached = np.array(list(_cached(ordered)) if prefix_caching else [0] * len(ordered), dtype=float)
    lengths = np.array([arrival.prompt_tokens for arrival in ordered], dtype=float)
    outputs = np.array([_outputs(arrival, server) for arrival in ordered], dtype=float)
    tpot = np.array([max(arrival.slo.tpot, *(tpot for _, tpot in arrival.slo.stages), 0.0) for arrival in ordered])
    ttft = np.array([arrival.slo.ttft for arrival in ordered]) + GRACE
    with np.errstate(invalid="ignore"):
        allowed = np.where(outputs > 0, outputs * tpot, 0.0) + GRACE
    coefficients, fresh, chunk = server.coefficients, lengths - cached, server.tokens
    prompt = coefficients.prefill * fresh + coefficients.quadratic * (lengths**2 - cached**2) / 2
    full, rest = np.divmod(fresh, chunk)
    last = np.array([server.overhead(tokens) if tokens else 0.0 for tokens in rest.tolist()])
    alone = prompt + full * server.overhead(chunk) + last
    steps = np.ceil(outputs / (1 + server.draft))
    attended = steps * lengths + steps * (steps - 1) / 2
    decode = coefficients.decode * outputs
    return Jobs(
        arrival=np.array([arrival.time for arrival in ordered], dtype=float),
        ttft=ttft,
        span=ttft + allowed,
        length=lengths,
        fresh=fresh,
        prompt=prompt,
        outputs=outputs,
        steps=steps,
        attended=attended,
        decode=decode,
        alone=alone,
        alone_decoding=steps * server.overhead(1) + decode + coefficients.longest * attended,
    )


def _outputs(arrival: Arrival, server: Server) -> int:
    """Return the tokens after the first."""
    limit = inf if server.kv_tokens is None else max(1, server.kv_tokens - arrival.prompt_tokens)
    return int(min(arrival.output_tokens, limit)) - 1


def _cached(arrivals: Sequence[Arrival]) -> Iterator[int]:
    """Yield the prompt tokens that earlier requests could have left in a cache, at best.

    A later arrival may be computed first and serve an earlier one. Then the shared blocks were computed
    after the later arrival and before the first token of the earlier one, which is inside the window of the
    request they are charged to.
    """
    seen: set[int] = set()
    for arrival in arrivals:
        ids = arrival.hash_ids
        hits = next((place for place, id in enumerate(ids) if id not in seen), len(ids))
        seen.update(ids)
        yield min(ceil(hits * arrival.block), arrival.prompt_tokens - 1)
