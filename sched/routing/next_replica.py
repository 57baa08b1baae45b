"""Routing of SLOs-Serve (arXiv 2504.08784, section 4.2): try replicas in turn until one can keep the SLO."""

from __future__ import annotations

from ..admission.base import Admission
from ..admission.dp import ByDP
from ..admission.none import AdmitAll
from ..api.errors import InvalidValue
from ..api.request import BEST_EFFORT, Request
from .base import Fleet, Router, Scalars


class NextReplica(Router):
    """A round-robin router that skips replicas that cannot promise the SLO. Writer of its turn.

    Asks at most `limit` replicas. If none can promise the SLO, the first keeps the request, and the
    admission control demotes it to best effort or refuses it. `admission` is the control to ask; if
    it admits every request, the dynamic program (`dp`) is asked instead.
    """

    def __init__(self, limit: int = 8, admission: Admission | None = None) -> None:
        if limit < 1:
            raise InvalidValue(f"next_replica {limit=} must be at least 1 replica to ask", "routing")
        self._limit = limit
        self._asked = ByDP() if admission is None or isinstance(admission, AdmitAll) else admission
        self._turn = -1

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        entries = fleet.entries
        self._turn = (self._turn + 1) % len(entries)
        route = entries[self._turn :] + entries[: self._turn]
        if request.tier == BEST_EFFORT:
            return route
        for hops, index in enumerate(route[: self._limit]):
            if self._asked.admits(request, fleet.instances[index], fleet.now):
                return [*route[hops:], *route[:hops]]
        return route

    def estimate(self, request: Request, scalars: Scalars) -> None:
        return None
