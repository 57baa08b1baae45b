"""In turn, whatever is there already."""

from __future__ import annotations

from ..request import Request
from ..scheduler import Scheduler


class RoundRobin:
    """Writer of its two turns: the Cluster that places."""

    def __init__(self) -> None:
        self._prefill = self._decode = -1

    def prefill(self, request: Request, instances: list[Scheduler]) -> list[int]:
        self._prefill += 1
        return [(self._prefill + i) % len(instances) for i in range(len(instances))]

    def decode(self, request: Request, instances: list[Scheduler]) -> list[int]:
        self._decode += 1
        return [(self._decode + i) % len(instances) for i in range(len(instances))]
