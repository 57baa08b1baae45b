"""Requests in order, with numpy columns kept up to date beside them, so that a policy need not rebuild them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf, nan

import numpy as np

from ..api.perf import Array
from ..api.policy import Order
from ..api.request import BEST_EFFORT, Request, State
from ..api.slo import ANSWER

Key = tuple[bool, int, float, int]
ARRIVAL, TTFT, TBT, TPOT, TIGHTEST, DEADLINE, REMAINING, CONTEXT, LENGTH, RUNNING, HIT, BEST, COLUMNS = range(13)


def key(request: Request) -> Key:
    """The order of service among equals: best effort last, then vLLM's priority (lower first), arrival, id."""
    return (request.tier == BEST_EFFORT, request.priority, request.arrival, request.id)


def tightest(request: Request, tpot: float) -> float:
    """The least tpot of the stages that a request, now at one of `tpot`, has still to go through."""
    return min(tpot, request.slo.tpot_of(ANSWER)) if request.slo.stages else tpot


class Table:
    """Requests sorted by `key`. Writer: the Scheduler that owns them. Policies see it as `Rows`."""

    def __init__(self, capacity: int = 64) -> None:
        self._requests: list[Request] = []
        self._keys: list[Key] = []
        self._data = np.zeros((COLUMNS, capacity))
        self._columns: dict[int, Array] = {}  # of `_data`, as long as rows do not come or go
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
    def backlog(self) -> int:
        """Tokens left to compute, less what is expected to be found in the prefix cache. Nothing is kept of it, so that
        other threads may ask: a column that one of them had kept, while rows came, would be too short for good."""
        data, count = self._data, len(self._requests)
        return int(data[REMAINING, :count].sum() - data[HIT, :count].sum())

    def last(self, order: Order) -> Array:
        """Not kept: results change it at every step, and few policies look."""
        times = [self._requests[row].token_times for row in order.tolist()]
        return np.array([one[-1] if one else nan for one in times], dtype=float)

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
        slo, tpot = request.slo, request.slo.tpot_of(request.stage)
        self._data[:, row] = (
            request.arrival,
            slo.ttft,
            inf if slo.tbt is None else slo.tbt,
            tpot,
            tightest(request, tpot),
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
        self.version += 1
        self.members += 1
        self.standard -= request.tier != BEST_EFFORT
        self._columns.clear()
        self._data[:, row : n - 1] = self._data[:, row + 1 : n]
        del self._requests[row], self._keys[row]

    def refresh(self, request: Request) -> None:
        """Take over what changes while a request runs."""
        row, tpot = self._row(request), request.slo.tpot_of(request.stage)
        self.version += 1
        self._data[TPOT : HIT + 1, row] = (
            tpot,
            tightest(request, tpot),
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
        self.version += 1
        self._data[DEADLINE, rows] = [
            one.first_token_at + one.budget if one.first_token_at is not None else one.deadline for one in requests
        ]
        self._data[CONTEXT, rows] = [request.computed for request in requests]

    def check(self) -> None:
        """Raises AssertionError where a number is none: policies could not put its row in any order."""
        wrong = np.flatnonzero(np.isnan(self._data[:, : len(self._requests)]).any(axis=0))
        assert not len(wrong), f"{self._requests[wrong[0]]} has NaN in its table"

    def _row(self, request: Request) -> int:
        row, requests = request.row, self._requests
        if row < len(requests) and requests[row] is request:
            return row  # nobody before it has come or gone since
        row = bisect_left(self._keys, key(request))
        if row == len(requests) or requests[row] is not request:
            raise KeyError(f"{request} is not in this table")
        request.row = row
        return row
