"""Faults below an engine, such as failures and hangs: every request ends with a reason."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.startup import assemble
from jaxserve.engine.startup.assemble import Machine
from jaxserve.errors import JaxserveError, QueueFull
from jaxserve.sched.api.errors import Unavailable
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.plan import UNAVAILABLE, Delta, StepPlan
from jaxserve.sched.api.slo import NO_SLO
from tests.support.engine.faults import LONG, PARAMS, HangingDevice, Starter, Submitted
from tests.support.timing import until

MESH = "2x1"  # for the fixture `machine`


@pytest.mark.parametrize("index", [0, 1])
def test_a_hung_step_is_noticed_and_other_requests_are_served(machine: Machine, start: Starter, index: int) -> None:
    engine = start(patience=0.4)
    stuck = HangingDevice(machine, index)
    lost = Submitted(engine)
    assert stuck.reached.wait(20)
    told = lost.end()
    assert told.finish_reason == UNAVAILABLE and f"a step of instance {stuck.executor.name}" in str(told.error)
    assert not engine.healthy and "does not end" in str(engine.ailment)
    assert Submitted(engine).end().finish_reason == "length"
    assert engine.stats().hung_steps == 1
    stuck.free.set()
    until(lambda: engine.healthy)
    assert engine.ailment is None and [role.value for role in engine.roles] == ["prefill", "decode"]
    assert Submitted(engine).end().finish_reason == "length"
    assert engine.drain(10)
    engine.check()


def test_an_import_that_does_not_end_costs_no_token(
    machine: Machine, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests decode where their prompts were computed while the other instance receives no KV."""
    engine, state, free = start(patience=1.0, routing="least_work"), machine.executors[1].state, threading.Event()
    usual, receive = Submitted(engine), state.receive
    assert usual.end().finish_reason == "length"
    moved = engine.stats().transfers

    def gated(piece: Any) -> Any:
        assert free.wait(60)
        return receive(piece)

    monkeypatch.setattr(state, "receive", gated)
    for late in [Submitted(engine) for _ in range(2)]:
        assert late.end().finish_reason == "length" and late.tokens == usual.tokens
    assert engine.healthy and engine.stats().transfers == moved
    free.set()
    again = Submitted(engine)
    assert again.end().finish_reason == "length" and again.tokens == usual.tokens
    assert engine.drain(10) and engine.stats().transfers > moved
    engine.check()


def test_an_engine_with_all_steps_hung_refuses_at_once_and_closes(
    machine: Machine, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "CLOSING", 0.3)
    engine = start(patience=0.3)
    stuck = [HangingDevice(machine, 0)]
    lost = [Submitted(engine)]
    assert stuck[0].reached.wait(20) and lost[0].end().finish_reason == UNAVAILABLE
    stuck.append(HangingDevice(machine, 1))
    lost.append(Submitted(engine))
    assert stuck[1].reached.wait(20) and lost[1].end().finish_reason == UNAVAILABLE
    with pytest.raises(Unavailable, match="does not end"):
        Submitted(engine)
    assert engine.close() is False, "it has not waited for the steps, which hang until they are freed"
    for one in stuck:
        one.free.set()
    time.sleep(0.1)


def test_the_death_of_the_device_thread_fails_the_engine_with_the_cause(machine: Machine, start: Starter) -> None:
    engine = start()

    def dies(plan: StepPlan) -> None:
        machine.executors[0].fault = None
        raise SystemExit("out of luck")

    machine.executors[0].fault = dies
    many = [Submitted(engine)]
    with suppress(JaxserveError):
        many += [Submitted(engine) for _ in range(4)]
    for one in many:
        told = one.end()
        assert told.finish_reason == "error" and "SystemExit: out of luck" in str(told.error), told
    assert "ExceptionGroup" not in str(engine.ailment) and "out of luck" in str(engine.ailment)
    with pytest.raises(JaxserveError, match="out of luck"):
        Submitted(engine)


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit("broken"), KeyboardInterrupt("broken")])
def test_every_request_ends_when_the_engine_dies(start: Starter, error: BaseException) -> None:
    """This includes requests that are submitted while it dies."""
    engine = start()
    scheduler = engine._cluster.cores[0].scheduler

    def breaks(*_: Any) -> Any:
        raise error

    told: list[Delta] = []
    handed, over = [0], threading.Event()

    def heard(delta: Delta) -> None:
        if delta.finish_reason is not None:
            told.append(delta)

    def hand_in() -> None:
        while not over.is_set():
            try:
                engine.submit(NewRequest([5] * 5, PARAMS, NO_SLO), heard)
            except QueueFull:
                time.sleep(0.001)
            except JaxserveError as refused:
                assert "broken" in str(refused)
                return
            else:
                handed[0] += 1

    threads = [threading.Thread(target=hand_in) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    scheduler.plan = breaks  # type: ignore[method-assign]
    for thread in threads:
        thread.join(20)
    over.set()
    engine.close()
    assert len(told) == handed[0] > 0
    assert all("broken" in str(one.error) for one in told if one.finish_reason == "error")
    assert "unhandled errors" not in str(engine.ailment) and f"{type(error).__name__}: broken" in str(engine.ailment)


def test_a_full_disk_stops_the_journal_only(start: Starter, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with caplog.at_level(logging.ERROR, "jaxserve"):
        engine = start(journal=str(full))
        assert [Submitted(engine, LONG).end().finish_reason for _ in range(3)] == ["length"] * 3
        assert engine.stats().journal_errors == 1 and engine.healthy
        engine.close()
    said = [record.message for record in caplog.records if "journal" in record.message]
    assert len(said) == 1 and "No space left" in said[0]


def test_the_queue_is_bounded_by_default(machine: Machine, start: Starter) -> None:
    engine = start()
    stuck = HangingDevice(machine, 0)
    many = []
    with pytest.raises(QueueFull, match=r"128 requests are waiting; the limit is max_num_queued_reqs=128") as full:
        for _ in range(1000):
            many.append(Submitted(engine))
            time.sleep(0.0002)
    assert 128 <= len(many) <= 160 and full.value.retry_after >= 1.0
    stuck.free.set()
    assert {one.end().finish_reason for one in many} == {"length"}


def test_a_request_that_waits_too_long_fails(machine: Machine, start: Starter) -> None:
    engine = start(queue_timeout="1500ms")
    stuck = HangingDevice(machine, 0)
    begun = Submitted(engine)
    assert stuck.reached.wait(20)
    waiting = [Submitted(engine) for _ in range(20)]
    ends = [one.end() for one in waiting[8:]]  # the first may be in the step that is planned ahead
    assert {one.finish_reason for one in ends} == {"expired"} and "no first token within 1.5 s" in str(ends[0].error)
    stuck.free.set()
    assert begun.end().finish_reason == "length"
    for one in waiting[:8]:  # those of the step that was planned ahead are served whole, the others not at all
        served = {"length": PARAMS.max_tokens, "expired": 0}
        assert served[one.end().finish_reason] == len(one.tokens)
    assert Submitted(engine).end().finish_reason == "length"
    engine.drain(10)
    engine.check()


def test_failing_steps_do_not_end_health_while_requests_are_served(machine: Machine, start: Starter) -> None:
    engine = start()
    for turn in range(4):

        def raises(plan: StepPlan) -> None:
            if any(span.begin is not None and span.begin.prompt_length == 7 for span in plan.spans):
                raise OSError("injected")

        machine.executors[0].fault = raises
        told = Submitted(engine, prompt=[turn] * 7).end()
        assert told.finish_reason == "error" and "failed twice" in str(told.error)
        assert Submitted(engine).end().finish_reason == "length"
        assert engine.healthy, engine.ailment
    assert engine.stats().counters.rebuilds == 8
