"""A router with outdated views of its instances, as if it received their state in messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..api.instance_view import InstanceView
from ..api.policy import Role
from ..api.request import Request, State
from ..routing.base import Fleet, Move, Router
from ..routing.snapshot import Snapshot

OFTEN = 4  # snapshots taken per `age`


class Picture(NamedTuple):
    """Views of all instances at one time."""

    at: float
    instances: tuple[InstanceView, ...]


class Stale(Router):
    """A router that decides by state that is between `age` and 1.25 `age` seconds old.

    Until `age` has passed it uses the first snapshot. Step-time models and prefix-cache hits are current.
    A request that it would move stays if its prompt has begun by now. Writer of its snapshots.
    """

    def __init__(self, router: Router, age: float) -> None:
        self._router = router
        self.writes_back, self.mixed_share = router.writes_back, router.mixed_share
        self._age = age
        self._pictures: deque[Picture] = deque()

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        return self._router.prefill(request, self._past(fleet))

    def decode(self, request: Request, fleet: Fleet) -> list[int]:
        return self._router.decode(request, self._past(fleet))

    def decode_in_place(self, request: Request, index: int, fleet: Fleet) -> bool:
        return self._router.decode_in_place(request, index, self._past(fleet))

    def decode_priority(self, request: Request, fleet: Fleet) -> float:
        return self._router.decode_priority(request, self._past(fleet))

    def predicted_first_token(self, request: Request) -> float | None:
        return self._router.predicted_first_token(request)

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        moves = self._router.redirect(self._past(fleet))
        return [move for move in moves if _waits(fleet.instances[move.source], move.request)]

    def roles(self, fleet: Fleet) -> Mapping[int, Role]:
        return self._router.roles(self._past(fleet))

    def _past(self, fleet: Fleet) -> Fleet:
        pictures, now = self._pictures, fleet.now
        if not pictures or now - pictures[-1].at >= self._age / OFTEN:
            pictures.append(Picture(now, tuple(Snapshot.of(instance, now) for instance in fleet.instances)))
        while len(pictures) > 1 and pictures[1].at <= now - self._age:
            pictures.popleft()
        return fleet._replace(instances=pictures[0].instances)


def _waits(instance: InstanceView, id: int) -> bool:
    """Return whether a request is still on the instance with no token computed."""
    return any(request.id == id and request.state is State.WAITING and not request.drops for request in instance)
