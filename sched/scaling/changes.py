"""Which replicas start, serve on and drain, so that a number of them serves."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Standing(StrEnum):
    """What a replica does."""

    STOPPED = "stopped"
    STARTING = "starting"
    SERVING = "ready"
    DRAINING = "draining"  # it finishes its requests, takes no more, and stops


class Changes(NamedTuple):
    """Replicas by their numbers."""

    start: Sequence[int] = ()
    resume: Sequence[int] = ()  # of those that drain
    drain: Sequence[int] = ()


def changes(target: int, standing: Sequence[Standing], requests: Sequence[int]) -> Changes:
    """Return what to change so that `target` replicas serve. requests: unfinished ones of each replica.

    Replicas that drain serve on before others start, and those with the fewest requests drain first. A
    replica that starts counts, and none of those that serve drains before there are more than `target`.
    """
    serving, starting, draining, stopped = (
        [at for at, state in enumerate(standing) if state is what]
        for what in (Standing.SERVING, Standing.STARTING, Standing.DRAINING, Standing.STOPPED)
    )
    missing = max(0, target - len(serving) - len(starting))
    resume = draining[:missing]
    idle = sorted(serving, key=lambda at: (requests[at], -at))
    return Changes(stopped[: missing - len(resume)], resume, idle[: max(0, len(serving) - target)])
