"""Parts that hang, crash and fail, for the runner of benchmarks/gpu_day: stage A one of each, stage B three hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.part import Part, Run, Skip

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
poisoned = False  # stands for a CUDA context after a sticky error


def parts(dry: bool) -> list[Part]:
    def one(stage: str, name: str, call: str, seconds: float = 30.0, **more: Any) -> Part:
        return Part(name, stage, seconds, f"{__name__}:{call}", **more)

    return [
        one("A", "ceiling", "ceiling"),
        one("A", "hang", "hang", 3.0),
        one("A", "abort", "abort"),
        one("A", "segfault", "segfault"),
        one("A", "sticky", "sticky"),
        one("A", "after sticky", "after_sticky"),
        one("A", "orphan", "orphan"),
        one("A", "absent", "ceiling", needs=("no_such_module",)),
        one("A", "unable", "unable"),
        one("A", "with a fact", "with_a_fact", arguments={"name": "ceiling"}),
        one("B", "first hang", "hang", 1.0),
        one("B", "second hang", "hang", 1.0),
        one("B", "never started", "ceiling"),
        one("C", "recovers", "recovers"),
        one("C", "long", "hang", 4.0),
        *(one("D", f"beside {number}", "beside", beside=True) for number in range(2)),
    ]


def ceiling(run: Run) -> None:
    run.row("ceilings", name="copy", value=1.5)
    run.fact("ceiling", 1.5)


def hang(run: Run) -> None:
    """Record a row, then sleep with a child in another session; neither ends on SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run.row("partial", part=run.part.name)
    orphan(run)
    time.sleep(600)


def orphan(run: Run) -> None:
    """Leave a process in a session of its own behind."""
    child = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    (run.folder / f"{run.part.name}.pid").write_text(str(child.pid))


def abort(run: Run) -> None:
    run.row("partial", part=run.part.name)
    os.abort()


def segfault(run: Run) -> None:
    run.row("partial", part=run.part.name)
    ctypes.string_at(0)


def sticky(run: Run) -> None:
    global poisoned
    poisoned = True
    run.row("partial", part=run.part.name)
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered\nat line 7")


def after_sticky(run: Run) -> None:
    assert not poisoned


def unable(run: Run) -> None:
    raise Skip("this machine has no such thing")


def with_a_fact(run: Run, name: str) -> None:
    run.row("facts", value=run.facts[name], left=run.left())


def recovers(run: Run) -> None:
    """Fail in the first call only."""
    before = run.folder / "before"
    if not before.exists():
        before.touch()
        run.row("tries", number=1)
        raise RuntimeError("not yet")
    run.row("tries", number=2)


def beside(run: Run) -> None:
    """Wait until the other part of this kind runs too."""
    mine = run.folder / run.part.name
    mine.touch()
    others: list[Path] = []
    while len(others) < 2:
        assert run.left() > 1, "the other part was not started"
        others = list(run.folder.glob("beside *"))
        time.sleep(0.01)
