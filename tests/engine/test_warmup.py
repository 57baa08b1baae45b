"""The order of warm-up: instances overlap where that is safe, and never on GPUs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.speculation.drafters import Call
from jaxserve.engine.startup import warmup
from jaxserve.engine.startup.calls import Rung

WAIT = 10.0  # seconds that end a test which would hang


class Instance:
    """An instance with two programs, which logs what begins and ends."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cpu")]))
        self.allocation: tuple[()] = ()
        self.complete = False
        self.compiling = threading.Event()

    def rebuild(self) -> None:
        """Nothing to allocate."""

    def lower(self) -> Instance:
        return self

    def install(self, args: tuple[Any, ...], made: None) -> None:
        assert args == () and made is None

    def compile(self, options: dict[str, Any]) -> None:
        self.log.append(f"compile {self.name}")
        self.compiling.set()


def warmed(monkeypatch: pytest.MonkeyPatch, platform: str) -> tuple[list[str], bool]:
    """Warm up two instances; return the log, and whether the second compiled while the first one ran."""
    log: list[str] = []
    first, second = Instance("0", log), Instance("1", log)
    overlapped = False

    def run_through(state: Any, rung: Rung) -> None:
        nonlocal overlapped
        log.append(f"run {state.name}")
        if state is first:
            overlapped = second.compiling.wait(WAIT if platform == "cpu" else 0.2)
        log.append(f"ran {state.name}")

    monkeypatch.setattr(warmup, "rungs", lambda state, **_: [Rung((), [Call("step", state, ())] * 2, True)])
    monkeypatch.setattr(warmup, "inner_calls", lambda state: [])
    monkeypatch.setattr(warmup, "inside", lambda state: 0)
    monkeypatch.setattr(warmup, "run_through", run_through)
    states: Any = [first, second]
    warmup.Ladder(states).begin(platform=platform)
    return log, overlapped


def test_instances_on_gpus_are_warmed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    log, overlapped = warmed(monkeypatch, "gpu")
    each = ["compile {0}", "compile {0}", "run {0}", "ran {0}"]
    assert log == [line.format(i) for i in (0, 1) for line in each] and not overlapped


def test_instances_on_a_cpu_compile_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    log, overlapped = warmed(monkeypatch, "cpu")
    assert overlapped and sorted(log) == sorted(["compile 0", "compile 1"] * 2 + ["run 0", "run 1", "ran 0", "ran 1"])
