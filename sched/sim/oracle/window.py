"""An upper bound on what one server can finish in time, for any windows: the linear relaxation, exactly.

The largest set of jobs with arbitrary release times and deadlines takes O(n^4) and more (Baptiste 1999,
after Lawler 1990). The relaxation counts a job that gets z of its w seconds inside its window as z/w, which
can only increase what a schedule attains. The feasible vectors z, with the sum of z over [a, b] at most
b - a for all intervals, are the flows from jobs into time: a polymatroid (Federgruen and Groenevelt 1986).
So greedy is optimal (Edmonds 1970): jobs by value per second, each getting as much as the earlier ones leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import Any

import numpy as np

from ...api.perf import Array

Ranks = np.ndarray[Any, np.dtype[np.intp]]
NONE = 1e-9  # seconds: shorter pieces are ignored


class Windows:
    """Accepted jobs and their schedule by earliest deadline. `rank` is an index into the distinct deadlines."""

    def __init__(self, release: Array, deadline: Array) -> None:
        self._release = release
        self.due, rank = np.unique(deadline, return_inverse=True)
        self._rank = rank.astype(np.intp)
        self._start: Array = np.zeros(0)
        self._end: Array = np.zeros(0)
        self._ranks: Ranks = np.zeros(0, dtype=np.intp)  # rank of the job that runs

    def fits(self, jobs: Sequence[int], work: Sequence[float]) -> bool:
        """Return whether all these jobs fit. If they do, they become the accepted jobs."""
        order = sorted(range(len(jobs)), key=lambda i: self._release[jobs[i]])
        releases = [*self._release[[jobs[i] for i in order]].tolist(), np.inf]
        ranks, due = self._rank[[jobs[i] for i in order]].tolist(), self.due.tolist()
        pieces: list[tuple[float, float, int]] = []
        queue: list[tuple[int, float]] = []  # rank, seconds left
        now, next_ = -np.inf, 0
        while queue or next_ < len(order):
            if not queue:
                now = max(now, releases[next_])
            while releases[next_] <= now:
                heappush(queue, (ranks[next_], work[order[next_]]))
                next_ += 1
            rank, left = queue[0]
            until = min(now + left, releases[next_])
            left -= until - now
            pieces.append((now, until, rank))
            now = until
            if left > 0 and now >= releases[next_]:
                heapreplace(queue, (rank, left))
            else:
                heappop(queue)
                if now > due[rank] + NONE:
                    return False
        self._splice(0, pieces)
        return True

    def room(self, job: int) -> float:
        """Return the most seconds of one more job that fit beside the accepted jobs.

        This is the least slack (b - a) - W(a, b) over intervals around its window, where W is the work of
        accepted jobs inside. For a given b, the least over a is the time that jobs due by b leave idle
        between the release and b; by earliest deadline first, jobs never wait for jobs due later.
        """
        release, rank = self._release[job], self._rank[job]
        first = int(np.searchsorted(self._end, release, side="right"))
        lengths = self._end[first:] - np.maximum(self._start[first:], release)
        used = np.cumsum(np.bincount(self._ranks[first:], weights=lengths, minlength=len(self.due)))
        return float(np.min(self.due[rank:] - release - used[rank:]))

    def accept(self, job: int, seconds: float) -> None:
        """Accept seconds of a job that `room` found possible, displacing jobs that are due later, in turn."""
        release, rank = float(self._release[job]), int(self._rank[job])
        first = int(np.searchsorted(self._end, release, side="right"))
        columns = (self._start[first:], self._end[first:], self._ranks[first:])
        old = zip(*(column.tolist() for column in columns), strict=True)
        extra = [[rank, seconds]]  # a heap of work to place in addition to the old schedule
        pieces: list[tuple[float, float, int]] = []
        now, seen = release, 0
        for start, end, rank in old:
            now = _run(extra, now, start, pieces) if now < start else now
            if not extra:
                break
            seen += 1
            if start < now:
                _add(pieces, start, now, rank)
            now = max(now, start)
            if rank <= extra[0][0]:
                _add(pieces, now, end, rank)
            else:
                displaced = end - now
                now = _run(extra, now, end, pieces, below=rank)
                displaced -= end - now
                if now < end:
                    _add(pieces, now, end, rank)
                if displaced > 0:
                    heappush(extra, [rank, displaced])
            now = end
        _run(extra, now, np.inf, pieces)
        self._splice(first, pieces, seen)

    def _splice(self, first: int, pieces: Sequence[tuple[float, float, int]], seen: int | None = None) -> None:
        last = len(self._start) if seen is None else first + seen
        start, end, rank = zip(*pieces, strict=True) if pieces else ((), (), ())
        self._start = np.concatenate((self._start[:first], np.array(start), self._start[last:]))
        self._end = np.concatenate((self._end[:first], np.array(end), self._end[last:]))
        self._ranks = np.concatenate((self._ranks[:first], np.array(rank, dtype=np.intp), self._ranks[last:]))


def _add(pieces: list[tuple[float, float, int]], start: float, end: float, rank: int) -> None:
    """Add a piece, merged with the last one if it continues it: this keeps the schedule short."""
    if pieces and pieces[-1][1] == start and pieces[-1][2] == rank:
        start = pieces.pop()[0]
    pieces.append((start, end, rank))


def _run(
    extra: list[list[Any]], now: float, until: float, pieces: list[tuple[float, float, int]], below: float = np.inf
) -> float:
    """Run waiting jobs with rank below `below` until `until` at most, and return when that ended."""
    while extra and now < until and extra[0][0] < below:
        rank, seconds = extra[0]
        end = min(now + seconds, until)
        _add(pieces, now, end, rank)
        extra[0][1] -= end - now
        if end < until or extra[0][1] <= NONE:
            heappop(extra)
        now = end
    return now


def most_value(release: Array, deadline: Array, work: Array, value: Array) -> float:
    """Return the largest total value of jobs on one server under the linear relaxation.

    A job that gets a share of its seconds within its window brings that share of its value. Work is in
    seconds, 0 or more; jobs without work bring all of their value.
    """
    free = work <= 0
    total = float(value[free].sum())
    order = [job for job in np.argsort(-value / np.where(free, 1.0, work), kind="stable").tolist() if not free[job]]
    windows = Windows(release, deadline)
    seconds = work.tolist()
    low, high = 0, len(order)  # the first `low` jobs fit completely
    while low < high:
        middle = (low + high + 1) // 2
        if windows.fits(order[:middle], [seconds[job] for job in order[:middle]]):
            low = middle
        else:
            high = middle - 1
    windows.fits(order[:low], [seconds[job] for job in order[:low]])
    total += float(value[order[:low]].sum())
    for job in order[low:]:
        part = min(seconds[job], windows.room(job))
        if part > NONE:
            windows.accept(job, part)
            total += float(value[job]) * part / seconds[job]
    return total
