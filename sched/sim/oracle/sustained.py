"""The rate that no policy sustains on an endless load: the finite bound without the queue left at its end.

In a run of n requests the last ones are served after the last arrival, which flatters policies and bounds
alike. In the long run, the work of the requests on time cannot exceed the servers' time. At best these are
the requests with the least work.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from ...api.errors import InvalidValue
from ...api.perf import Array
from ...metrics import GOAL
from ...perf.model import Coefficients
from ..workload import Arrival
from .price import decodes_alone, prompts_alone, shared_prices
from .work import Details, Server, check_goal, jobs


def sustained_bound(
    arrivals: Sequence[Arrival],
    coefficients: Coefficients,
    prefill_servers: int,
    decode_servers: int,
    *,
    deflection: bool,
    chunk: int,
    details: Details | None = None,
    goal: float = GOAL,
) -> float:
    """Return a rate, in requests per second, above which no policy sustains the goal on repeated arrivals like these.

    Returns 0 if too few of the requests can attain their SLO alone. Arguments as for oracle.goodput_bound.
    Steps are assumed to be always full, and prompts to have the prefix hits they have in these arrivals.
    Raises InvalidValue.
    """
    check_goal(goal)
    if min(prefill_servers, decode_servers) < 0 or prefill_servers + deflection * decode_servers < 1:
        raise InvalidValue(f"{prefill_servers=} and {decode_servers=} leave no server to compute prompts")
    details = Details() if details is None else details
    server = Server(coefficients, chunk, details.rows, details.draft, details.kv_tokens)
    every = jobs(arrivals, server, prefix_caching=details.prefix_caching)
    able = every.take(every.possible)
    count = ceil(goal * len(every) - 1e-9)
    if len(able) < count:
        return 0.0
    together = np.zeros(len(able))  # all requests at once: the lowest price
    loads = [(prompts_alone(able, server), prefill_servers + deflection * decode_servers)]
    if decode_servers:
        loads.append((decodes_alone(able, server, together), decode_servers))
    if deflection and decode_servers:
        loads += [
            (price.prompt + price.decode, prefill_servers + decode_servers)
            for price in shared_prices(able, server, together)
        ]
    return min(_rate(work, servers, count, len(every)) for work, servers in loads)


def _rate(work: Array, servers: int, count: int, every: int) -> float:
    least = float(np.sort(work)[:count].sum())
    return servers * every / least if least > 0 else np.inf
