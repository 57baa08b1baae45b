"""The requests of one instance, sorted by order of service, with numpy columns for policies."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from math import inf, nan

import numpy as np

from ..api.perf import Array
from ..api.policy import Order, Role
from ..api.request import BEST_EFFORT, Request, State, tightest
from .prefix_hits import PrefixHits

Key = tuple[int, int, float, int]
ARRIVAL, TTFT, TBT, TPOT, TIGHTEST, DEADLINE, REMAINING, CONTEXT, LENGTH, RUNNING, HIT = range(11)
BEST, WEIGHT, COLUMNS = range(11, 14)


def key(request: Request) -> Key:
    """Return the default sort key: best effort last, first what was demoted; then vLLM's priority, arrival, id."""
    return (request.best_effort, request.priority, request.arrival, request.id)


class RequestQueue:
    """Requests sorted by `key`. Writer: the Scheduler that owns them. Policies see it as `QueueView`."""

    def __init__(self, capacity: int = 64) -> None:
        self._requests: list[Request] = []
        self._keys: list[Key] = []
        self._data = np.zeros((COLUMNS, capacity))
        self._columns: dict[int, Array] = {}  # views of `_data`, valid until a row is added or removed
        self.version = 0
        self.members = 0
        self.standard = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, row: int) -> Request:
        return self._requests[row]

    def _column(self, index: int) -> Array:
        column = self._columns.get(index)
        if column is None:
            column = self._columns[index] = self._data[index, : len(self._requests)]
            column.flags.writeable = False
        return column

    @property
    def arrival(self) -> Array:
        return self._column(ARRIVAL)

    @property
    def ttft(self) -> Array:
        return self._column(TTFT)

    @property
    def tbt(self) -> Array:
        return self._column(TBT)

    @property
    def tpot(self) -> Array:
        return self._column(TPOT)

    @property
    def tightest(self) -> Array:
        return self._column(TIGHTEST)

    @property
    def deadline(self) -> Array:
        return self._column(DEADLINE)

    @property
    def remaining(self) -> Array:
        return self._column(REMAINING)

    @property
    def context(self) -> Array:
        return self._column(CONTEXT)

    @property
    def length(self) -> Array:
        return self._column(LENGTH)

    @property
    def running(self) -> Array:
        return self._column(RUNNING)

    @property
    def hit(self) -> Array:
        return self._column(HIT)

    @property
    def best_effort(self) -> Array:
        return self._column(BEST)

    @property
    def weight(self) -> Array:
        return self._column(WEIGHT)

    @property
    def backlog(self) -> int:
        """Tokens to compute, without expected prefix-cache hits.

        Bypasses the cached columns, because other threads may read it: a column that such a thread
        cached while a row was added would stay too short.
        """
        data, count = self._data, len(self._requests)
        return int(data[REMAINING, :count].sum() - data[HIT, :count].sum())

    def last(self, order: Order) -> Array:
        """Return the times of the last tokens. Not a column, since they change every step and are rarely read."""
        times = [self._requests[row].token_times for row in order.tolist()]
        return np.array([time[-1] if time else nan for time in times], dtype=float)

    def add(self, request: Request) -> None:
        place = key(request)
        row = bisect_left(self._keys, place)
        n = len(self._requests)
        self.version += 1
        self.members += 1
        self.standard += request.tier != BEST_EFFORT
        self._columns.clear()
        if n == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.zeros_like(self._data)], axis=1)
        self._data[:, row + 1 : n + 1] = self._data[:, row:n]
        self._requests.insert(row, request)
        self._keys.insert(row, place)
        slo = request.slo
        tbt = inf if slo.tbt is None else slo.tbt
        values = request.arrival, slo.ttft, tbt, *_changing(request), request.best_effort, slo.weight
        self._data[:, row] = values

    def remove(self, request: Request) -> None:
        row = self._row(request)
        n = len(self._requests)
        self.version += 1
        self.members += 1
        self.standard -= request.tier != BEST_EFFORT
        self._columns.clear()
        self._data[:, row : n - 1] = self._data[:, row + 1 : n]
        del self._requests[row], self._keys[row]

    def refresh(self, request: Request) -> None:
        """Update the columns that change while a request runs."""
        row = self._row(request)
        self.version += 1
        self._data[TPOT : HIT + 1, row] = _changing(request)

    def step(self, requests: Sequence[Request]) -> None:
        """Update the columns that a decode step changes. A cheaper `refresh` for many rows at every step."""
        own, count, rows, moved = self._requests, len(self._requests), [], 0
        for request in requests:
            row = request.row + moved  # most rows moved as far as the one before
            if not 0 <= row < count or own[row] is not request:
                before = request.row
                row = self._row(request)
                moved = row - before
            request.row = row
            rows.append(row)
        self.version += 1
        self._data[DEADLINE, rows] = [
            decoding.first_token_at + decoding.budget if decoding.first_token_at is not None else decoding.deadline
            for decoding in requests
        ]
        self._data[CONTEXT, rows] = [request.computed for request in requests]

    def check(self) -> None:
        """Assert that no number is NaN, which would break every order."""
        wrong = np.flatnonzero(np.isnan(self._data[:, : len(self._requests)]).any(axis=0))
        assert not len(wrong), f"{self._requests[wrong[0]]} has NaN in its columns"

    def _row(self, request: Request) -> int:
        row, requests = request.row, self._requests
        if row < len(requests) and requests[row] is request:
            return row  # no row before it was added or removed since
        row = bisect_left(self._keys, key(request))
        if row == len(requests) or requests[row] is not request:
            raise KeyError(f"{request} is not in this queue")
        request.row = row
        return row


def _changing(request: Request) -> tuple[float, ...]:
    """Return the columns TPOT to HIT, which change while a request runs."""
    tpot = request.slo.tpot_of(request.stage)
    return (
        tpot,
        tightest(request, tpot),
        request.deadline,
        request.remaining,
        request.computed,
        request.prompt_length,
        request.state is State.RUNNING,
        request.hit if request.state is State.WAITING else 0,
    )


SHOWN = 4  # waiting best-effort requests shown to the policy, per row of the instance
LEAST = 64  # lower bound of that number


def shown(rows: int) -> int:
    """Return how many waiting best-effort requests an instance with this many rows shows to its policy."""
    return max(LEAST, SHOWN * rows)


class WaitingRoom:
    """Waiting requests that the policy does not see, by order of service. Writer: the RequestQueues."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._requests: dict[int, Request] = {}
        self.backlog = 0  # tokens to compute, including possible prefix hits

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, id: int) -> bool:
        return id in self._requests

    def add(self, request: Request) -> None:
        insort(self._keys, key(request))
        self._requests[request.id] = request
        self.backlog += request.remaining

    def discard(self, request: Request) -> None:
        """Remove a request if it is here."""
        if self._requests.pop(request.id, None) is None:
            return
        place = key(request)
        at = bisect_left(self._keys, place)
        assert self._keys[at] == place, f"{request} is not in its place"
        del self._keys[at]
        self.backlog -= request.remaining

    def first(self) -> Request | None:
        """Return the first request in order of service, or None."""
        return self._requests[self._keys[0][3]] if self._keys else None


class RequestQueues:
    """The requests of one instance, in two queues by what they need next. Writer: the Scheduler.

    `prefill` holds requests with prompt tokens to compute, including KV that was dropped; `decode`
    holds those with one token to compute. Requests that wait for a result or for another instance
    are in neither. `hits` watches the waiting ones. At most `shown` waiting best-effort requests
    are in `prefill`, the first in order of service; the others are in `room`, which policies do not
    see.
    """

    def __init__(self, role: Role, hits: PrefixHits, shown: int = 1 << 30) -> None:
        self.role = role
        self.hits = hits
        self.room = WaitingRoom()
        self._shown = shown
        self._seen: dict[int, Request] = {}  # waiting best-effort requests in `prefill`
        self._order: list[Key] = []  # their keys, sorted
        self.requests: dict[int, Request] = {}
        self.prefill = RequestQueue()
        self.decode = RequestQueue()
        self._filed: dict[int, RequestQueue] = {}

    @property
    def seen_as(self) -> Role:
        """The role shown to the policy: MIXED while a prefill instance still has running decodes."""
        return Role.MIXED if self.role is Role.PREFILL and len(self.decode) else self.role

    def runnable(self, id: int) -> bool:
        """Return whether a request is in a queue, so that the policy may grant it tokens."""
        return id in self._filed

    @property
    def backlog(self) -> int:
        """Prompt tokens to compute, without expected prefix-cache hits."""
        return self.prefill.backlog + self.room.backlog

    def file(self, request: Request) -> None:
        """Put a request into the queue it belongs to now, or update its columns."""
        spare = request.state is State.WAITING and request.tier == BEST_EFFORT
        if spare and request.id not in self._seen:
            if request.id in self.room or not self._show(request):
                return
        elif not spare:
            self._forget(request)
        self._put(request)
        if not spare:
            self._reveal()

    def _put(self, request: Request) -> None:
        table, before = self._belongs(request), self._filed.get(request.id)
        if table is not before:
            self._take_out(request)
        self._watch(request)
        if table is before and table is not None:
            table.refresh(request)
        elif table is not None:
            table.add(request)
            self._filed[request.id] = table

    # Waiting best-effort requests.

    def _show(self, request: Request) -> bool:
        """Show a best-effort request that begins to wait, if it is among the first. Returns whether it is.

        If needed, the last shown request goes to the room; otherwise the new one does.
        """
        if len(self._order) >= self._shown:
            if key(request) > self._order[-1]:
                self._take_out(request)
                self.room.add(request)
                return False
            last = self._seen[self._order[-1][3]]
            self._forget(last)
            self._take_out(last)
            self.room.add(last)
        self._seen[request.id] = request
        insort(self._order, key(request))
        return True

    def _forget(self, request: Request) -> None:
        """Remove a request from the waiting best-effort requests, if it is one."""
        if self._seen.pop(request.id, None) is not None:
            del self._order[bisect_left(self._order, key(request))]
        elif self.room:
            self.room.discard(request)

    def _reveal(self) -> None:
        """Show requests from the room in freed places."""
        while len(self._order) < self._shown and (request := self.room.first()) is not None:
            self.room.discard(request)
            self._seen[request.id] = request
            insort(self._order, key(request))
            self._put(request)

    def step(self, requests: Sequence[Request]) -> None:
        """Update rows of `decode` that were planned again and have more tokens to plan. See `file`."""
        self.decode.step(requests)

    def _watch(self, request: Request) -> None:
        waits = request.state is State.WAITING
        if waits is not (request.id in self.hits):
            if waits:
                self.hits.watch(request)
            else:
                self.hits.unwatch(request.id)

    def refresh_hits(self) -> None:
        """Apply changes of the prefix cache."""
        for request in self.hits.refresh():
            self.prefill.refresh(request)

    def unfile(self, request: Request) -> None:
        """Remove a request from its queue."""
        self._forget(request)
        self._take_out(request)
        self._reveal()

    def _take_out(self, request: Request) -> None:
        self.hits.unwatch(request.id)
        table = self._filed.pop(request.id, None)
        if table is not None:
            table.remove(request)

    def demote(self, id: int) -> bool:
        """Make a request best effort. Returns False if it was already."""
        request = self.requests[id]
        if request.tier == BEST_EFFORT:
            return False
        filed = id in self._filed
        if filed:
            self._take_out(request)
        request.tier = BEST_EFFORT
        if filed:
            self.file(request)
        return True

    def set_role(self, role: Role) -> list[Request]:
        """Change the role of the instance.

        Returns the requests that waited to be decoded elsewhere and are decoded here instead.
        """
        self.role = role
        kept = []
        for request in self.requests.values():
            if request.state is State.FINISHED:
                continue
            decodes = request.state is State.RUNNING and request.generated > 0 and request.remaining == 1
            request.decodes_in_place = role is Role.PREFILL and decodes
            if request.state is State.TRANSFERRING and role is not Role.PREFILL:
                request.state = State.RUNNING
                kept.append(request)
            self.file(request)
        return kept

    def check(self) -> None:
        """Assert that every request is in the right queue and every count is right."""
        for request in self.requests.values():
            assert request.inflight >= 0 and request.pending >= 0, f"{request} has a negative counter"
            hidden = request.id in self.room
            table = None if hidden else self._belongs(request)
            assert self._filed.get(request.id) is table, f"{request} is in the wrong queue"
            spare = request.state is State.WAITING and request.tier == BEST_EFFORT
            assert spare is (hidden or request.id in self._seen), (
                f"{request} is missing from, or wrongly in, waiting best effort"
            )
        for table in (self.prefill, self.decode):
            table.check()
            assert table.standard == sum(queued.tier != BEST_EFFORT for queued in table), "best effort is miscounted"
        assert len(self.prefill) + len(self.decode) == len(self._filed), "queues and index disagree"
        assert self._filed.keys() <= self.requests.keys(), "a request that left is still in a queue"
        assert not self.room or len(self._order) == self._shown, (
            "a request is hidden from the policy although there is room to show it"
        )
        waiting = {id for id, queued in self.requests.items() if queued.state is State.WAITING and id not in self.room}
        assert waiting == set(self.hits), "prefix hits do not track exactly the waiting requests"
        self.hits.check()

    def _belongs(self, request: Request) -> RequestQueue | None:
        if request.state is State.WAITING:
            return self.prefill
        if request.state is not State.RUNNING or request.generated >= request.limit:
            return None
        if request.suspended or request.drafting or request.held:
            return None  # what to compute next, or what to sample, is not known yet
        if request.pending and self.role is Role.PREFILL and not request.decodes_in_place:
            return None  # its prompt is computed, so it will be transferred
        return self.decode if request.remaining == 1 and request.generated else self.prefill
