"""Simulations in several processes, with progress from inside each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.sched.sim import Report
from jaxserve.sched.sim.sweep import Case, Cell, Run

Tell = Callable[[float], None]  # simulations done since the start; running ones count by their requests

POLL = 0.2  # seconds between looks at the progress of other processes
_done: Any = None  # in a worker process: the counter that all share


def count(jobs: int | None) -> int:
    """Return the number of processes of `--jobs`. Raises InvalidValue."""
    if jobs is not None and jobs < 1:
        raise InvalidValue(f"jobs={jobs} must be at least 1", "jobs")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return jobs or cores


@contextmanager
def processes(jobs: int | None, tell: Tell | None = None) -> Iterator[Run]:
    """Yield an ordered map over cases that uses several processes, started for two or more cases."""
    workers = count(jobs)
    context = multiprocessing.get_context("spawn")
    shared = context.Value("d", 0.0)
    pools: list[Any] = []

    def run(cell: Cell, cases: Sequence[Case]) -> Iterable[Report]:
        if min(workers, len(cases)) == 1:
            return (_counted(cell, case, shared, tell) for case in cases)
        if not pools:
            pools.append(context.Pool(min(workers, max(len(cases), 2)), _start, (shared,)))
        return _polled(pools[0].imap(partial(_work, cell), cases), shared, tell)

    try:
        yield run
    finally:
        for pool in pools:
            pool.terminate()
            pool.join()


def _polled(reports: Any, shared: Any, tell: Tell | None) -> Iterator[Report]:
    while True:
        try:
            report: Report = reports.next(timeout=POLL)
        except multiprocessing.TimeoutError:
            if tell is not None:
                tell(shared.value)
        except StopIteration:
            return
        else:
            yield report


def _start(shared: Any) -> None:
    global _done
    _done = shared


def _work(cell: Cell, case: Case) -> Report:
    return _counted(cell, case, _done, None)


def _counted(cell: Cell, case: Case, shared: Any, tell: Tell | None) -> Report:
    """Run a case, and add its progress to the shared counter: 1 in all."""
    seen = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        share = done / total if total else 1.0
        with shared.get_lock():
            shared.value += share - seen
        seen = share
        if tell is not None:
            tell(shared.value)

    return cell(case, progress)
