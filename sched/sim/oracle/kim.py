"""The largest number of jobs that one server can finish in time, exactly, if releases and deadlines agree in order.

H. Kise, T. Ibaraki, H. Mine, "A solvable case of the one-machine scheduling problem with ready and due times",
Operations Research 26 (1978). A single TTFT makes deadline = arrival + constant, which is a case of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...api.errors import InvalidValue
from ...api.perf import Array


def in_agreement(release: Array, deadline: Array) -> bool:
    """Return whether sorting by release time also sorts by deadline."""
    return bool(np.all(np.diff(deadline[np.lexsort((deadline, release))]) >= 0))


def most_on_time(release: Sequence[float] | Array, deadline: Sequence[float] | Array, seconds: Sequence[float]) -> int:
    """Count the most jobs that fit, with job i inside [release[i], deadline[i]] for seconds[i]. O(n²), in numpy.

    Jobs that are all on time can run in the common order of releases and deadlines: of a pair out of order,
    both are released and neither is late when exchanged. So among the first j jobs, the earliest end C[k] of
    k on-time jobs decides: C'[k] = min(C[k], max(C[k - 1], release[j]) + seconds[j]), the latter if in time.
    Preemption gains nothing: earliest deadline first completes every feasible set, and never preempts, since
    a job released later is due later. Raises InvalidValue if the orders differ.
    """
    releases, deadlines, work = (np.asarray(times, dtype=float) for times in (release, deadline, seconds))
    if not len(releases) == len(deadlines) == len(work):
        raise InvalidValue(f"{len(releases)} releases, {len(deadlines)} deadlines, {len(work)} seconds must be as many")
    if not np.all(work >= 0):
        raise InvalidValue(f"seconds={float(work.min())!r} must be 0 or more", "seconds")
    if not in_agreement(releases, deadlines):
        raise InvalidValue("deadlines must be ordered as releases are", "deadline")
    ends = np.full(len(work) + 1, np.inf)
    ends[0] = -np.inf
    most = 0
    for job in np.lexsort((deadlines, releases)).tolist():
        with_it = np.maximum(ends[: most + 1], releases[job]) + work[job]
        with_it[with_it > deadlines[job]] = np.inf
        np.minimum(ends[1 : most + 2], with_it, out=ends[1 : most + 2])
        most += bool(ends[most + 1] < np.inf)
    return most
