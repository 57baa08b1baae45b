"""The fault matrix on two instances of two emulated devices each: every request ends with a reason.

A sample of it, with one device per instance, is in test_faults.py and always runs;
tests/sched/cluster/test_fault_matrix.py runs it in virtual time with two instances per role.
Signals to a whole process are in tests/server/test_killed.py. `python benchmarks/fault_matrix.py`
makes a table of the outcomes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.assemble import Machine
from jaxserve.errors import JaxserveError
from jaxserve.sched.api.plan import UNAVAILABLE, StepPlan
from tests.support.engine.faults import LONG, HangingDevice, Starter, Submitted
from tests.support.timing import until

MESH = "2x2"  # for the fixture `machine`
COUNT = 12
PREFILL, DECODE = 0, 1
INSTANCES = ("the prefill instance", "the decode instance")
TOLD = {"length": "finished", UNAVAILABLE: "503 unavailable", "error": "500 error", "abort": "cancelled"}
pytestmark = pytest.mark.full


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[[str, str, Counter[str]], None]:
    """Record a row of the table that benchmarks/fault_matrix.py writes."""

    def note(fault: str, at: str, found: Counter[str]) -> None:
        record_property("fault", fault)
        record_property("at", at)
        record_property("got", ", ".join(f"{found[reason]} × {said}" for reason, said in TOLD.items() if found[reason]))

    return note


def ends(many: list[Submitted]) -> Counter[str]:
    """Check that each request ends exactly once."""
    return Counter(str(one.end(60.0).finish_reason) for one in many)


def works(engine: Engine) -> None:
    """Check that the engine serves as before, with no page, slot or request lost."""
    until(lambda: engine.healthy)
    assert engine.ailment is None
    assert ends([Submitted(engine) for _ in range(4)]) == {"length": 4}
    assert engine.drain(20)
    engine.check()


@pytest.mark.parametrize("index", [PREFILL, DECODE])
def test_a_step_raises(machine: Machine, start: Starter, record: Any, index: int) -> None:
    engine, done = start(), []

    def raises(plan: StepPlan) -> None:
        done.append(plan.step)
        if len(done) == 3:
            raise OSError("injected")

    machine.executors[index].fault = raises
    found = ends([Submitted(engine, LONG) for _ in range(COUNT)])
    record("a step raises", INSTANCES[index], found)
    assert found == {"length": COUNT}
    machine.executors[index].fault = None
    works(engine)


@pytest.mark.parametrize("index", [PREFILL, DECODE])
def test_a_step_hangs(machine: Machine, start: Starter, record: Any, index: int) -> None:
    engine = start(patience=0.5)
    stuck = HangingDevice(machine, index)
    found = ends([Submitted(engine, LONG) for _ in range(COUNT)])
    record("a step hangs", INSTANCES[index], found)
    assert set(found) <= {"length", UNAVAILABLE} and found[UNAVAILABLE] >= 1, found
    assert not engine.healthy
    stuck.free.set()
    works(engine)


@pytest.mark.parametrize("index", [PREFILL, DECODE])
def test_a_step_returns_late(machine: Machine, start: Starter, record: Any, index: int) -> None:
    engine, done = start(patience=5.0), []

    def late(plan: StepPlan) -> None:
        done.append(plan.step)
        if len(done) == 3:
            time.sleep(1.0)

    machine.executors[index].fault = late
    found = ends([Submitted(engine, LONG) for _ in range(COUNT)])
    record("a step returns late", INSTANCES[index], found)
    assert found == {"length": COUNT}
    works(engine)


@pytest.mark.parametrize("times", [2, 3 * COUNT])
def test_transfers_fail(
    machine: Machine, start: Starter, record: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    engine = start(routing="least_work")
    moves, count = machine.executors[DECODE].import_kv, [0]

    async def fails(*given: Any) -> None:
        count[0] += 1
        if count[0] <= times:
            raise OSError("injected: the link is down")
        await moves(*given)

    monkeypatch.setattr(machine.executors[DECODE], "import_kv", fails)
    found = ends([Submitted(engine, LONG) for _ in range(COUNT)])
    record(f"{'two' if times == 2 else 'all'} KV transfers fail", INSTANCES[DECODE], found)
    assert found == {"length": COUNT}
    works(engine)


def test_a_transfer_hangs(machine: Machine, start: Starter, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(patience=0.5, routing="least_work")
    moves, count = machine.executors[DECODE].import_kv, [0]

    async def hangs(*given: Any) -> None:
        count[0] += 1
        await (asyncio.sleep(3600) if count[0] == 2 else moves(*given))

    monkeypatch.setattr(machine.executors[DECODE], "import_kv", hangs)
    found = ends([Submitted(engine, LONG) for _ in range(COUNT)])
    record("a KV transfer hangs", INSTANCES[DECODE], found)
    assert found == {"length": COUNT}
    works(engine)


@pytest.mark.parametrize("index", [PREFILL, DECODE])
def test_a_thread_dies(machine: Machine, start: Starter, record: Any, index: int) -> None:
    engine = start()
    many = [Submitted(engine, LONG) for _ in range(COUNT)]

    def dies(plan: StepPlan) -> None:
        machine.executors[index].fault = None
        raise SystemExit("injected")

    machine.executors[index].fault = dies
    found = ends(many)
    record("the thread of an instance dies", INSTANCES[index], found)
    assert set(found) <= {"length", "error"} and found["error"] >= 1, found
    with pytest.raises(JaxserveError, match="SystemExit: injected"):
        Submitted(engine)


def test_clients_vanish(start: Starter, record: Any) -> None:
    engine = start()
    many = [Submitted(engine, LONG) for _ in range(COUNT)]
    many[0].first()
    for one in many[::2]:
        engine.cancel(one.id)
    found = ends(many)
    record("half of the clients vanish", "the server", found)
    assert found == {"abort": COUNT // 2, "length": COUNT // 2}
    works(engine)


def test_the_disk_is_full(start: Starter, record: Any) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    engine = start(journal="/dev/full")
    found = ends([Submitted(engine, LONG) for _ in range(COUNT)])
    record("the disk of the journal is full", "the process", found)
    assert found == {"length": COUNT}
    assert engine.stats().journal_errors == 1
    works(engine)
