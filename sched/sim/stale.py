"""A router with outdated views of its instances, as if it received their state in messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..api.instance_view import InstanceView, ReadOnlyView
from ..api.perf import Array
from ..api.policy import Order, QueueView, Role, View
from ..api.request import Request, RequestView, State
from ..routing.base import Fleet, Move, Router

OFTEN = 4  # snapshots taken per `age`


class Seen(ReadOnlyView):
    """An outdated InstanceView: queues, contexts, pages and predictions are from the past.

    Role, limits, step-time model and prefix-cache hits are current.
    """

    ends = 0.0
    prefill_backlog = decode_context = running = waiting = 0

    def __init__(self, live: InstanceView, now: float) -> None:
        super().__init__(live)
        view = live.view(now, max(now, live.ends))
        self._view = replace(view, prefill=PastQueue(view.prefill), decode=PastQueue(view.decode))
        self._requests = tuple(live)
        self._version = live.version
        self.ends = live.ends
        self.prefill_backlog = live.prefill_backlog
        self.decode_context = live.decode_context
        self.running = live.running
        self.waiting = live.waiting

    @property
    def version(self) -> Hashable:
        return self._version, super().version

    def view(self, now: float, start: float) -> View:
        return replace(self._view, now=now, start=start)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._requests)


class PastQueue:
    """An outdated QueueView, with copied columns."""

    arrival: Array
    ttft: Array
    tbt: Array
    tpot: Array
    tightest: Array
    deadline: Array
    remaining: Array
    context: Array
    length: Array
    running: Array
    hit: Array
    best_effort: Array

    def __init__(self, rows: QueueView) -> None:
        self._requests = tuple(rows)
        self.version = rows.version
        self.members = rows.members
        self.standard = rows.standard
        self._last = rows.last(np.arange(len(rows)))
        for name in self.__annotations__:
            setattr(self, name, getattr(rows, name).copy())

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._requests)

    def __getitem__(self, row: int) -> RequestView:
        return self._requests[row]

    def last(self, order: Order) -> Array:
        return self._last[order]


class Picture(NamedTuple):
    """Views of all instances at one time."""

    at: float
    instances: tuple[InstanceView, ...]


class Stale:
    """A router that decides by state that is between `age` and 1.25 `age` seconds old.

    Until `age` has passed it uses the first snapshot. A request that it would move stays if its prompt has
    begun by now. Writer of its snapshots.
    """

    def __init__(self, router: Router, age: float) -> None:
        self._router = router
        self.writes_back = router.writes_back
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
            pictures.append(Picture(now, tuple(Seen(one, now) for one in fleet.instances)))
        while len(pictures) > 1 and pictures[1].at <= now - self._age:
            pictures.popleft()
        return fleet._replace(instances=pictures[0].instances)


def _waits(instance: InstanceView, id: int) -> bool:
    """Return whether a request is still on the instance with no token computed."""
    return any(one.id == id and one.state is State.WAITING and not one.drops for one in instance)
