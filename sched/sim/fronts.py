"""Several fronts that route to the same instances, each with outdated state and without the others' choices."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from ..api.instance_view import InstanceView
from ..api.request import Request
from ..routing.base import Fleet, Move, Router
from ..routing.front import SHORTLIST, Front
from ..routing.snapshot import Snapshot
from .stale import OFTEN


class Picture(NamedTuple):
    """The instances that changed since the picture before."""

    at: float
    mark: int  # requests sent until then
    instances: Mapping[int, Snapshot]


class Fronts(Router):
    """A router of requests by fronts in turn, whose state is between `age` and 1.25 `age` seconds old.

    Each counts what it sent itself since. Instances keep their requests and roles: a front does not
    move what it has sent. Writer of its pictures.
    """

    def __init__(self, routers: Sequence[Router], age: float, shortlist: int = SHORTLIST) -> None:
        """`routers`: one for each front."""
        self._routers, self.mixed_share = routers, routers[0].mixed_share
        self._age = age
        self._shortlist = shortlist
        self._fronts: list[Front] = []
        self._pictures: deque[Picture] = deque()
        self._last: list[Hashable] = []  # states of the instances in the last picture
        self._taken = 0.0
        self._sent = 0

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        self._look(fleet)
        front = self._fronts[self._sent % len(self._fronts)]
        index = front.choose(request, fleet.now)
        if index is None:
            return fleet.entries
        self._sent += 1
        front.sent(index, request, self._sent)
        return [index]

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        if self._age:
            self._look(fleet)
        return ()

    def _look(self, fleet: Fleet) -> None:
        """Take a picture if it is time, and let the fronts see those that are old enough."""
        now, first = fleet.now, not self._fronts
        if first:
            count = len(fleet.instances)
            self._fronts = [
                Front(router, [1] * count, shortlist=self._shortlist, fronts=len(self._routers), seed=seed)
                for seed, router in enumerate(self._routers)
            ]
            self._last = [None] * count
        if first or now - self._taken >= self._age / OFTEN:
            self._taken = now
            self._pictures.append(Picture(now, self._sent, self._changed(fleet)))
        while self._pictures and (first or self._pictures[0].at <= now - self._age):
            picture = self._pictures.popleft()
            for front in self._fronts:
                for index, snapshot in picture.instances.items():
                    front.update(index, {index: snapshot}, picture.mark)

    def _changed(self, fleet: Fleet) -> dict[int, Snapshot]:
        changed = {}
        for index, instance in enumerate(fleet.instances):
            state = _state(instance)
            if state != self._last[index]:
                self._last[index] = state
                changed[index] = Snapshot.of(instance, fleet.now, identify=False)
        return changed


def _state(instance: InstanceView) -> Hashable:
    return instance.version, instance.ends, instance.accepting
