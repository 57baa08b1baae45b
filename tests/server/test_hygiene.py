"""GC control and event loop stalls: stalls are counted, garbage is collected in gaps, and settings are restored."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.engine.runtime import gc_control
from jaxserve.engine.runtime.gc_control import (
    EDGES,
    GCControl,
    Stalls,
    uncollected,
    watched_loop,
)
from jaxserve.sched.api.params import SamplingParams
from tests.support.server.live import ALONE
from tests.support.timing import until


class Cycle:
    """A reference cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.self = self


def litter(count: int = 0) -> weakref.ref[Cycle]:
    """Leave `count` cycles behind, by default more than the collector's threshold; returns a reference to one."""
    cycles = [Cycle() for _ in range(count or 2 * gc.get_threshold()[0])]
    return weakref.ref(cycles[0])


def aged() -> weakref.ref[Cycle]:
    """Return a reference to garbage that only a full collection frees."""
    cycles = [Cycle()]
    gc.collect(0)
    gc.collect(1)
    return weakref.ref(cycles.pop())


@pytest.fixture
def process(monkeypatch) -> Iterator[None]:
    """Isolate the process settings of one test, as if no engine ran beside it; restore them afterwards."""
    enabled, interval, frozen = gc.isenabled(), sys.getswitchinterval(), gc.get_freeze_count()
    monkeypatch.setattr(gc_control, "_process", gc_control._Process())
    gc.enable()
    sys.setswitchinterval(5e-3)
    yield
    sys.setswitchinterval(interval)
    if frozen:
        gc.freeze()  # the session's engine is still serving
    (gc.enable if enabled else gc.disable)()


def test_a_callback_that_blocks_is_counted():
    stalls = Stalls()
    loop = watched_loop(stalls)

    async def main() -> None:
        await asyncio.sleep(0.01)
        stalls.clear()
        time.sleep(0.03)
        await asyncio.sleep(0)

    loop.run_until_complete(main())
    loop.close()
    assert stalls.count >= 1 and stalls.seconds >= 0.03
    assert sum(stalls.sizes) == stalls.count and sum(stalls.sizes[EDGES.index(0.02) + 1 :]) >= 1


def test_short_work_and_waiting_do_not_count_as_stalls():
    stalls = Stalls()
    for seconds in (0.0, 0.004, 0.005):
        stalls.saw(seconds)
    assert stalls.count == 0 and not any(stalls.sizes)
    for seconds in (0.006, 0.01, 7.0):
        stalls.saw(seconds)
    assert stalls.sizes == [0, 2, *[0] * (len(EDGES) - 2), 1] and stalls.seconds == pytest.approx(7.016)


def test_a_request_that_blocks_the_engines_loop_is_exported(live):
    before = live.sums()
    live.engine._loop.call_soon_threadsafe(time.sleep, 0.06)
    until(lambda: live.engine.stats().stall_seconds - before["event_loop_stall_seconds_sum"] >= 0.06)
    after = live.sums()
    gained = {name: after[name] - before[name] for name in after}
    assert gained["event_loop_stalls_total"] >= 1
    assert gained["event_loop_stall_seconds_sum"] >= 0.06
    assert after["event_loop_stalls_total"] <= after["event_loop_stall_seconds_count"]


def test_an_idle_engine_collects_garbage(live):
    live.quiet()
    assert not gc.isenabled() and gc.get_freeze_count() > 0
    cycles: list[weakref.ref[Cycle]] = []

    def gone() -> bool:
        cycles.append(litter())  # again: a cycle still in use at a collection has aged, and is not looked at for long
        return any(cycle() is None for cycle in cycles)

    until(gone)
    assert live.engine.stats().collections["idle"] >= 1 and live.engine.stats().collection_seconds > 0


def test_process_settings_are_restored(process):
    interval = sys.getswitchinterval()
    first, second = GCControl(lambda: inf), GCControl(lambda: inf)
    first.end()
    assert gc.isenabled(), "GC control had not begun"
    first.begin()
    second.begin()
    assert not gc.isenabled() and sys.getswitchinterval() < interval and gc.get_freeze_count() > 0
    first.end()
    first.end()
    assert not gc.isenabled(), "the second engine is still serving"
    second.end()
    assert gc.isenabled() and sys.getswitchinterval() == interval and gc.get_freeze_count() == 0


def test_closing_an_llm_restores_process_settings(process):
    interval = sys.getswitchinterval()
    with LLM(**ALONE) as llm:
        assert not gc.isenabled()
        assert llm.generate([5, 6], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished
    assert gc.isenabled() and sys.getswitchinterval() == interval
    llm.close()
    assert gc.isenabled(), "closing twice changes nothing"


def test_starting_an_engine_does_not_disturb_a_serving_one(process):
    gc.unfreeze()
    serving = GCControl(lambda: inf)
    with uncollected():
        assert not gc.isenabled() and gc.get_freeze_count() == 0
        serving.begin()
    assert not gc.isenabled() and gc.get_freeze_count() > 0, "an engine that began meanwhile is still serving"
    with pytest.raises(RuntimeError), uncollected():
        raise RuntimeError("a program does not compile")
    assert not gc.isenabled() and gc.get_freeze_count() > 0
    serving.end()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_disabled_collector_stays_disabled(process):
    gc.disable()
    one = GCControl(lambda: inf)
    one.begin()
    one.end()
    assert not gc.isenabled()


@pytest.fixture
def tended(process, monkeypatch) -> Iterator[Any]:
    """A GC control with a slack set by the test, polled by the test, without the session's engine polling."""
    said, look = {"slack": inf}, GCControl.look
    one: Any = GCControl(lambda: said["slack"])
    monkeypatch.setattr(GCControl, "look", lambda self: look(self) if self is one else None)
    one.said = said
    one.begin()
    yield one
    one.end()


def test_garbage_waits_for_a_gap(tended):
    tended.said["slack"] = 1e-9
    cycle = litter()
    tended.look()
    assert cycle() is not None and not tended.collections, "a request would be late"
    tended.said["slack"] = 1000.0
    tended.look()
    assert cycle() is None and tended.collections == {"slack": 1}


def test_an_idle_process_collects_all_generations(tended):
    cycle = aged()
    litter()
    tended.look()
    assert cycle() is not None and tended.collections == {"idle": 1}, "an old cycle, right after a full collection"
    tended._full_at -= 60.0
    tended.look()
    assert cycle() is None and tended.collections == {"idle": 2}
    tended.look()
    assert tended.collections == {"idle": 2}, "no new garbage"


def test_memory_is_bounded_without_gaps(tended, monkeypatch):
    """This includes old garbage, for which no gap is long enough."""
    tended.said["slack"] = 1e-9
    cycle = aged()
    litter()
    tended.look()
    assert cycle() is not None and not tended.collections, "little garbage"
    monkeypatch.setattr(gc_control, "GROWN", 0.0)
    tended.look()
    assert not tended.collections, "right after a full collection"
    tended._full_at -= 60.0
    tended.look()
    assert cycle() is None and tended.collections == {"memory": 1}


def test_collection_is_retried_after_one_slow_collection(tended):
    """The expected duration is that of the last one and decays, or an interrupted collection would stay the last."""
    tended.said["slack"] = 1.0
    tended._cost[0] = 0.5
    cycle = litter()
    looks = 0
    while not tended.collections:
        tended.look()
        looks += 1
        assert looks < 100
    assert looks > 10 and cycle() is None and tended.collections == {"slack": 1}
