"""Days of parts that hang, crash and fail, for the runner of benchmarks/gpu_day; `whole` has one of each kind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

from benchmarks.gpu_day.device import Device, limited
from benchmarks.gpu_day.part import Part, Run, Skip

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
DAY = "JAXSERVE_TEST_DAY"  # which of the days below
poisoned = False  # stands for a CUDA context after a sticky error


def one(name: str, call: str, seconds: float = 30.0, **more: Any) -> Part:
    return Part(name, seconds, f"{__name__}:{call}", **more)


DAYS = {
    "whole": [
        one("ceiling", "ceiling"),
        one("hang", "hang", 3.0),
        one("abort", "abort"),
        one("segfault", "segfault"),
        one("sticky", "sticky"),
        one("after sticky", "after_sticky"),
        one("orphan", "orphan"),
        one("absent", "ceiling", needs=("no_such_module",)),
        one("unable", "unable"),
        one("with a fact", "with_a_fact", arguments={"name": "ceiling"}),
        one("items", "items", restarts=True),
    ],
    "short": [one("recovers", "recovers"), one("long", "hang", 4.0)],
    "beside": [*(one(f"check {number}", "beside", beside=True) for number in range(2)), one("after", "ceiling")],
}


def parts(dry: bool) -> list[Part]:
    return DAYS[os.environ.get(DAY, "whole")]


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


def items(run: Run) -> None:
    """Do items of which one aborts, one hangs in a kernel, one is wrong and one cannot run."""

    def never(_: Run) -> None:
        with limited(0.2):
            time.sleep(600)

    def wrong(_: Run) -> None:
        assert 1 > 2, "relative error 0.4 is more than 0.01"

    work = {"right": ceiling, "aborts": abort, "wrong": wrong, "hangs": never, "unable": unable, "last": ceiling}
    run.each({name: partial(call, run) for name, call in work.items()})


def recovers(run: Run) -> None:
    """Fail in the first call only."""
    before = run.folder / "before"
    if not before.exists():
        before.touch()
        run.row("tries", number=1)
        raise RuntimeError("not yet")
    run.row("tries", number=2)


def beside(run: Run) -> None:
    """Share items with the other part, under the device's lock: shared by all, then alone."""
    device = Device(run.scratch)

    def shared(number: int) -> None:
        with device.shared(20):
            (run.folder / run.part.name).touch()
            while len(list(run.folder.glob("check *"))) < 2 and number == 0:  # the other part is inside too
                time.sleep(0.01)

    def alone(number: int) -> None:
        with device.alone(20):
            inside = run.folder / "inside"
            inside.touch(exist_ok=False)
            time.sleep(0.02)
            inside.unlink()

    run.each({f"{run.part.name} shared": partial(shared, 0)})
    run.each({f"alone {number}": partial(alone, number) for number in range(8)}, claim=True)
