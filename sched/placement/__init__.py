"""Which instance a request prefills and decodes on: one small file each, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from ..errors import InvalidValue
from ..request import Request
from ..scheduler import Scheduler

PLACEMENTS = {"least_work": "least_work:LeastWork", "round_robin": "round_robin:RoundRobin"}


class Placement(Protocol):
    """Orders instances for a request, best first. Schedulers are there to be read, not written."""

    def prefill(self, request: Request, instances: list[Scheduler]) -> list[int]:
        """Indices of the instances that may compute its prompt."""

    def decode(self, request: Request, instances: list[Scheduler]) -> list[int]:
        """Indices of the instances that may decode it."""


def make(name: str) -> Placement:
    """A new placement. Raises InvalidValue naming what is allowed."""
    if name not in PLACEMENTS:
        raise InvalidValue(f"unknown placement {name!r}; choose one of {', '.join(sorted(PLACEMENTS))}", "placement")
    module, _, factory = PLACEMENTS[name].partition(":")
    placement: Placement = getattr(import_module(f".{module}", __package__), factory)()
    return placement
