"""Clairvoyant bounds for the requests, servers and limits of a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

from ..api.errors import InvalidValue
from ..api.policy import Role
from ..metrics import GOAL
from .latency import Latency
from .options import DEFAULT, Mesh, Options
from .oracle import Bound, Details, bound, goodput_bound
from .simulate import Drawn, arrivals_of
from .workload import Arrival

# Routers that never deflect, and routers that may make all instances mixed.
STAYING = ("fewest_requests", "least_work", "next_replica", "prefill_budget", "round_robin")
TURNING = ("auto", "unified")


class Bounded(NamedTuple):
    """The bound for all policies at one rate with one seed."""

    rate: float
    seed: int
    bound: Bound


def bounds(
    workload: Drawn | Sequence[Arrival],
    mesh: Mesh | str,
    latency: Latency,
    *,
    rates: Sequence[float | None],
    seeds: Sequence[int] = (0,),
    num_requests: int | None = None,
    options: Options = DEFAULT,
) -> Iterator[Bounded]:
    """Compute the bound for each rate and seed.

    Requests without an SLO are left out. Raises InvalidValue if requests come in rounds, since the arrival
    of later rounds depends on the policy.
    """
    for rate in rates:
        for seed in seeds:
            arrivals, actual = _promised(workload, rate, num_requests, seed)
            yield Bounded(actual, seed, bound(arrivals, latency.solve(), **_servers(mesh, latency, options)))


def goodput_bounds(
    workload: Drawn | Sequence[Arrival],
    mesh: Mesh | str,
    latency: Latency,
    *,
    seeds: Sequence[int] = (0,),
    num_requests: int | None = None,
    options: Options = DEFAULT,
    goal: float = GOAL,
) -> list[float]:
    """Return per seed the rate, in requests per second, from which on no policy reaches the goal."""
    rates = []
    for seed in seeds:
        rate = None if isinstance(workload, Sequence) else 1.0
        arrivals, asked = _promised(workload, rate, num_requests, seed)
        highest = goodput_bound(arrivals, latency.solve(), **_servers(mesh, latency, options), goal=goal)
        counted = arrivals[options.skip : len(arrivals) - options.skip]
        came = (len(counted) - 1) / (counted[-1].time - counted[0].time)  # the rate as the bound computes it
        rates.append(highest * asked / came)
    return rates


def _promised(
    workload: Drawn | Sequence[Arrival], rate: float | None, count: int | None, seed: int
) -> tuple[list[Arrival], float]:
    arrivals, actual = arrivals_of(workload, rate, count, seed)
    if any(arrival.after is not None for arrival in arrivals):
        raise InvalidValue("no bound exists for requests that come in rounds", "bound")
    return [arrival for arrival in arrivals if min(arrival.slo.ttft, arrival.slo.tpot) < inf], actual


def _servers(mesh: Mesh | str, latency: Latency, options: Options) -> dict[str, Any]:
    if options.cascade:
        raise InvalidValue("no bound exists with cascade attention, which reads less than each context", "bound")
    roles = (Mesh.parse(mesh) if isinstance(mesh, str) else mesh).roles
    device, routing = options.device(latency), options.routing.partition(":")[0]
    prefill = 0 if routing in TURNING else roles.count(Role.PREFILL)
    return {
        "prefill_servers": prefill,
        "decode_servers": len(roles) - prefill,
        "deflection": Role.MIXED in roles or routing not in STAYING,
        "chunk": options.tokens,
        "details": Details(
            rows=options.rows,
            draft=options.draft,
            kv_tokens=device.pages * device.page_size,
            prefix_caching=options.prefix_caching is not False,
            skip=options.skip,
        ),
    }
