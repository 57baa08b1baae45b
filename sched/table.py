"""Requests in order, with numpy columns kept up to date beside them, so that a policy need not rebuild them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from .perf.model import Array
from .request import BEST_EFFORT, Request, State
from .slo import deadline

Key = tuple[bool, int, float, int]
ARRIVAL, TTFT, TPOT, DEADLINE, REMAINING, CONTEXT, LENGTH, RUNNING, HIT, BEST, COLUMNS = range(11)


def key(request: Request) -> Key:
    """The order of service among equals: best effort last, then vLLM's priority (lower first), arrival, id."""
    return (request.tier == BEST_EFFORT, request.priority, request.arrival, request.id)


class Table:
    """Requests sorted by `key`. Writer: the Scheduler that owns them. Policies see it as `Rows`."""

    def __init__(self, capacity: int = 64) -> None:
        self._requests: list[Request] = []
        self._keys: list[Key] = []
        self._data = np.zeros((COLUMNS, capacity))
        self._columns: dict[int, Array] = {}  # of `_data`, as long as rows do not come or go

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
    def tpot(self) -> Array:
        return self._column(TPOT)

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

    def add(self, request: Request) -> None:
        place = key(request)
        row = bisect_left(self._keys, place)
        n = len(self._requests)
        self._columns.clear()
        if n == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.zeros_like(self._data)], axis=1)
        self._data[:, row + 1 : n + 1] = self._data[:, row:n]
        self._requests.insert(row, request)
        self._keys.insert(row, place)
        slo = request.slo
        self._data[:, row] = (
            request.arrival,
            slo.ttft,
            request.slo.tpot_of(request.stage),
            request.deadline,
            request.remaining,
            request.computed,
            request.prompt_length,
            request.state is State.RUNNING,
            request.hit if request.state is State.WAITING else 0,
            request.tier == BEST_EFFORT,
        )

    def remove(self, request: Request) -> None:
        row = self._row(request)
        n = len(self._requests)
        self._columns.clear()
        self._data[:, row : n - 1] = self._data[:, row + 1 : n]
        del self._requests[row], self._keys[row]

    def refresh(self, request: Request) -> None:
        """Take over what changes while a request runs."""
        row = self._row(request)
        self._data[TPOT : HIT + 1, row] = (
            request.slo.tpot_of(request.stage),
            request.deadline,
            request.remaining,
            request.computed,
            request.prompt_length,
            request.state is State.RUNNING,
            request.hit if request.state is State.WAITING else 0,
        )

    def step(self, requests: Sequence[Request]) -> None:
        """Take over what a decode step changes: the cheap part of `refresh`, for many rows at every step."""
        own, count, rows, moved = self._requests, len(self._requests), [], 0
        for request in requests:
            row = request.row + moved  # most have moved as far as the one before
            if not 0 <= row < count or own[row] is not request:
                before = request.row
                row = self._row(request)
                moved = row - before
            request.row = row
            rows.append(row)
        self._data[DEADLINE, rows] = [
            deadline(one.slo, one.arrival, one.first_token_at, one.budget) for one in requests
        ]
        self._data[CONTEXT, rows] = [request.computed for request in requests]

    def _row(self, request: Request) -> int:
        row, requests = request.row, self._requests
        if row < len(requests) and requests[row] is request:
            return row  # nobody before it has come or gone since
        row = bisect_left(self._keys, key(request))
        if row == len(requests) or requests[row] is not request:
            raise KeyError(f"{request} is not in this table")
        request.row = row
        return row
