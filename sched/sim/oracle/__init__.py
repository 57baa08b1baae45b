"""The clairvoyant bound: the most requests that can attain their SLO under any policy.

Even a policy that knows all arrivals and output lengths cannot do more work in a window than its servers
have time. For the step-time model of a simulation without noise, the bound counts only work that no policy
can avoid (work.py, price.py), and treats m servers as one that is m times as fast. So it holds for every
policy, router, admission, preemption and migration. Ignoring KV space, transfers, whole steps and single
servers makes it larger than the optimum, never smaller. One assumption is made: a token gained by dropping
the KV of a request and recomputing it costs no less than a decode step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor, inf
from typing import NamedTuple

import numpy as np

from ...api.errors import InvalidValue
from ...api.perf import Array
from ...metrics import GOAL
from ...perf.model import Coefficients
from ..workload import Arrival
from .kim import in_agreement, most_on_time
from .price import decodes_alone, prompts_alone, shared
from .sustained import sustained_bound
from .window import most_value
from .work import Details, Server, check_goal, jobs

__all__ = ["Bound", "Details", "bound", "goodput_bound", "most_on_time", "most_value", "sustained_bound"]

DETAILS = Details()
ROUNDING = 1e-6  # requests
NEVER = 1e-6  # share of the given arrival rate below which the search stops


class Bound(NamedTuple):
    """At most `attained` of `requests` attain their SLO.

    which: the bound that is tightest. `first tokens`: the prompts, exactly (Kise-Ibaraki-Mine). `prompts`:
        the prompts, by linear relaxation. `decodes`: the outputs. `all work`: both on the same servers.
        `alone`: the requests that attain their SLO if served alone.
    impossible: requests that would miss their SLO even alone.
    """

    attained: int
    requests: int
    which: str
    impossible: int

    @property
    def share(self) -> float:
        return self.attained / self.requests


def bound(
    arrivals: Sequence[Arrival],
    coefficients: Coefficients,
    prefill_servers: int,
    decode_servers: int,
    *,
    deflection: bool,
    chunk: int,
    details: Details = DETAILS,
) -> Bound:
    """Bound the number of requests that any policy can serve within their SLO.

    deflection: decode servers may compute prompts, too. Colocated servers are decode servers that do.
    chunk: limit of a step in tokens. Raises InvalidValue for impossible arguments.
    """
    return _Case(arrivals, coefficients, (prefill_servers, decode_servers), deflection, chunk, details).bound()


def goodput_bound(
    arrivals: Sequence[Arrival],
    coefficients: Coefficients,
    prefill_servers: int,
    decode_servers: int,
    *,
    deflection: bool,
    chunk: int,
    details: Details = DETAILS,
    goal: float = GOAL,
    tolerance: float = 0.005,
) -> float:
    """Return a rate, in requests per second, from which on no policy reaches the goal.

    The arrivals are stretched to each rate. The result is at most `tolerance` (a share) above the lowest
    such rate by this bound; 0 if no rate reaches the goal, inf if every rate does.

    The search is a bisection: with closer arrivals, a set of jobs has no more time in any interval, as long
    as prices of work do not change. Prices fall with the number of requests present at once, so the prices
    at a rate are valid for all lower rates, and they are updated at each rate found. Raises InvalidValue.
    """
    check_goal(goal)
    if not 0 < tolerance < inf:
        raise InvalidValue(f"{tolerance=} must be more than 0", "tolerance")
    case = _Case(arrivals, coefficients, (prefill_servers, decode_servers), deflection, chunk, details)
    return case.goodput(goal, tolerance)


class _Case:
    """Requests and servers, before the times between arrivals are stretched."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        coefficients: Coefficients,
        servers: tuple[int, int],
        deflection: bool,
        chunk: int,
        details: Details,
    ) -> None:
        for name, count in zip(("prefill_servers", "decode_servers"), servers, strict=True):
            if count < 0:
                raise InvalidValue(f"{name}={count!r} must be 0 or more", name)
        prefill, self._decode = servers
        self._both = deflection and self._decode > 0
        self._prefill = prefill + self._decode if deflection else prefill
        if self._prefill < 1:
            raise InvalidValue(f"prefill_servers={prefill} must be 1 or more if no other server computes prompts")
        skip = details.skip
        if skip < 0 or 2 * skip >= len(arrivals):
            raise InvalidValue(f"{skip=} must be 0 or more, and leave some of {len(arrivals)} requests", "skip")
        self._server = Server(coefficients, chunk, details.rows, details.draft, details.kv_tokens)
        counted = jobs(arrivals, self._server, prefix_caching=details.prefix_caching)
        counted = counted.take(np.arange(skip, len(arrivals) - skip))
        self._requests = len(counted)
        self._jobs = counted.take(counted.possible)
        span = float(counted.arrival[-1] - counted.arrival[0])
        self._rate = (self._requests - 1) / span if span > 0 else 0.0

    def bound(self, stretch: float = 1.0, priced_at: float | None = None) -> Bound:
        """Bound with arrivals stretched by a factor, and work priced as if by `priced_at` (None: the same)."""
        candidates = [(len(self._jobs), "alone"), *self._bounds(stretch, stretch if priced_at is None else priced_at)]
        attained, which = min(candidates, key=lambda candidate: candidate[0])
        return Bound(attained, self._requests, which, self._requests - len(self._jobs))

    def _bounds(self, stretch: float, priced_at: float) -> Iterator[tuple[int, str]]:
        able, server, arrival = self._jobs, self._server, self._jobs.arrival * stretch
        if not len(able):
            return
        due, end, ready = arrival + able.ttft, arrival + able.span, arrival + able.alone
        prompt = prompts_alone(able, server) / self._prefill
        if in_agreement(arrival, due):
            yield most_on_time(arrival, due, prompt.tolist()), "first tokens"
        else:
            yield _most(arrival, due, prompt), "prompts"
        if self._decode:
            yield _most(ready, end, decodes_alone(able, server, able.arrival * priced_at) / self._decode), "decodes"
        if self._both:
            costs = shared(able, server, able.arrival * priced_at)
            work = np.concatenate(costs) / self._prefill
            both = costs.prompt + costs.decode
            share = np.divide(costs.prompt, both, out=np.ones(len(able)), where=both > 0)
            # Two jobs per request, each worth its share of the work: a request that attains its SLO gets both.
            starts, ends = np.concatenate((arrival, ready)), np.concatenate((due, end))
            yield _most(starts, ends, work, np.concatenate((share, 1.0 - share))), "all work"

    def goodput(self, goal: float, tolerance: float) -> float:
        if not self._rate:
            raise InvalidValue("arrivals must not all be at one time: they have no rate", "arrivals")
        if len(self._jobs) < goal * self._requests:
            return 0.0
        if self.bound(0.0).share >= goal:
            return inf
        priced_at, high = 0.0, self._rate
        while self.bound(self._rate / high, priced_at).share >= goal:
            high *= 2
        while True:
            before, high = high, self._bisect(high, priced_at, goal, tolerance)
            if priced_at and high >= before / (1 + tolerance):
                return high
            priced_at = self._rate / high

    def _bisect(self, high: float, priced_at: float, goal: float, tolerance: float) -> float:
        """Return the lowest rate found that misses the goal, given one that does."""
        low = 0.0
        while high > low * (1 + tolerance) and high > self._rate * NEVER:
            middle = (low * high) ** 0.5 if low else high / 2
            if self.bound(self._rate / middle, priced_at).share >= goal:
                low = middle
            else:
                high = middle
        return high


def _most(release: Array, deadline: Array, work: Array, value: Array | None = None) -> int:
    return floor(most_value(release, deadline, work, np.ones(len(work)) if value is None else value) + ROUNDING)
