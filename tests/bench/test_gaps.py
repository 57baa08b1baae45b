"""Step times and gaps from a journal, as the benchmarks of the engine show them."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.engine_bench.gaps import gaps
from jaxserve.sched.journal import replay
from tests.support.sched.harness import Job
from tests.support.sched.recorded import perf, recorded


def test_gaps_of_a_recorded_run() -> None:
    """The full steps are those that a replay finds; on the virtual clock one begins as the one before it ends."""
    lines = recorded([Job(range(50 * i, 50 * i + 9), 6) for i in range(3)], "1x1", "distserve").splitlines()
    full = [step for step in replay(lines, perf).steps if step.load.decode][:-1]  # the last has two rows left
    found = gaps(lines, -1.0, 3)
    assert found["steps"] == len(full) == 5
    assert found["step_ms"] == pytest.approx(1e3 * median(step.seconds for step in full))
    assert (found["gap_ms_mean"], found["planned_ahead"]) == (0.0, 1.0)
