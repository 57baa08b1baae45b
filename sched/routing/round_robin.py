"""Instances in turn, whatever their load."""

from __future__ import annotations

from ..api.request import Request
from .base import Fleet, Router, Scalars


class RoundRobin(Router):
    """A round-robin router. Writer of its two counters."""

    def __init__(self) -> None:
        self._prefill = self._decode = -1

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        self._prefill += 1
        return _from(fleet.entries, self._prefill)

    def estimate(self, request: Request, scalars: Scalars) -> None:
        return None

    def decode(self, request: Request, fleet: Fleet) -> list[int]:
        self._decode += 1
        return _from(fleet.decoders, self._decode)


def _from(indices: list[int], turn: int) -> list[int]:
    start = turn % len(indices)
    return indices[start:] + indices[:start]
