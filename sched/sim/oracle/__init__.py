"""The clairvoyant bound: how many requests could attain their SLO at most, whatever the policy.

A policy that knew all arrivals and output lengths could still not do more work in a window than its servers have
time. What follows counts, for the step-time model of a simulation without noise, only work that no policy can do
without (work.py, price.py), and treats m servers as one of m times the speed. So it holds for every policy, routing,
admission, preemption and migration. What it leaves out (KV space, transfers, whole steps, one server each) makes it
larger than the optimum, never smaller. One thing is taken for granted: a token that is had by dropping a request's
KV and computing it again costs no less than a decode step.
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
NEVER = 1e-6  # times the rate of the arrivals as given: low enough to stop looking


class Bound(NamedTuple):
    """At most `attained` of `requests` attain their SLO. which: what says so.

    `first tokens`: the prompts, exactly (Kise-Ibaraki-Mine); `prompts`: the prompts, by the linear relaxation;
    `decodes`: the outputs; `all work`: both on the same servers. impossible: those that would miss their SLO alone.
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
    """The most requests that any policy can serve as promised.

    deflection: decode servers may compute prompts too; colocated servers are decode servers that do. chunk: most
    tokens in a step. Raises InvalidValue.
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
    """A rate in requests per second from which on no policy reaches the goal, when the arrivals are stretched to it.

    At most `tolerance` (a share) above the lowest such rate that the bound tells; 0 where no rate reaches the goal,
    inf where every one does. Bisection: at closer arrivals a set of jobs has no more time in any interval, as long as
    work has the same price. Prices fall with the number of requests that are there at once, so those of a rate hold
    for all lower ones too, and are taken anew from each rate that is found. Raises InvalidValue.
    """
    check_goal(goal)
    if not 0 < tolerance < inf:
        raise InvalidValue(f"{tolerance=} must be more than 0", "tolerance")
    case = _Case(arrivals, coefficients, (prefill_servers, decode_servers), deflection, chunk, details)
    return case.goodput(goal, tolerance)


class _Case:
    """Requests and servers; the times between arrivals are still to be stretched."""

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
            raise InvalidValue(f"prefill_servers={prefill} must be 1 or more where nobody else computes prompts")
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
        """With arrivals so many times as far apart; work costs what it does at `priced_at` times, here if None."""
        found = [(len(self._jobs), "alone"), *self._bounds(stretch, stretch if priced_at is None else priced_at)]
        attained, which = min(found, key=lambda one: one[0])
        return Bound(attained, self._requests, which, self._requests - len(self._jobs))

    def _bounds(self, stretch: float, priced_at: float) -> Iterator[tuple[int, str]]:
        one, server, arrival = self._jobs, self._server, self._jobs.arrival * stretch
        if not len(one):
            return
        due, end, ready = arrival + one.ttft, arrival + one.span, arrival + one.alone
        prompt = prompts_alone(one, server) / self._prefill
        if in_agreement(arrival, due):
            yield most_on_time(arrival, due, prompt.tolist()), "first tokens"
        else:
            yield _most(arrival, due, prompt), "prompts"
        if self._decode:
            yield _most(ready, end, decodes_alone(one, server, one.arrival * priced_at) / self._decode), "decodes"
        if self._both:
            costs = shared(one, server, one.arrival * priced_at)
            work = np.concatenate(costs) / self._prefill
            both = costs.prompt + costs.decode
            share = np.divide(costs.prompt, both, out=np.ones(len(one)), where=both > 0)
            # Two jobs a request, each worth its share of the work: whoever attains its SLO gets both.
            starts, ends = np.concatenate((arrival, ready)), np.concatenate((due, end))
            yield _most(starts, ends, work, np.concatenate((share, 1.0 - share))), "all work"

    def goodput(self, goal: float, tolerance: float) -> float:
        if not self._rate:
            raise InvalidValue("arrivals that are all at one time have no rate", "arrivals")
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
        """The lowest rate found, down from one that does not reach the goal, that does not either."""
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
