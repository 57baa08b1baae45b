"""Calls from other threads run in order, and other work of the loop goes on between them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable

import pytest

from jaxserve.engine.runtime import intake as under_test
from jaxserve.engine.runtime.intake import SLICE, Intake


def run(calls: int, call: Callable[[int], None], events: list[int | str]) -> None:
    """Let another thread make calls, and the loop note each of its turns."""

    async def main() -> None:
        intake = Intake(asyncio.get_running_loop())
        over = asyncio.Event()
        giver = threading.Thread(target=lambda: [intake(call, at) for at in range(calls)] + [intake(over.set)])
        giver.start()
        giver.join()  # all calls wait before the first runs
        while not over.is_set():
            events.append("turn")
            await asyncio.sleep(0)

    asyncio.run(main())


def test_other_work_goes_on_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, events = [0.0], list[int | str]()
    monkeypatch.setattr(under_test, "perf_counter", lambda: now[0])

    def call(at: int) -> None:
        now[0] += SLICE / 4
        events.append(at)

    run(100, call, events)
    assert [event for event in events if event != "turn"] == list(range(100))
    turns = [at for at, event in enumerate(events) if event == "turn"]
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 6 and len(turns) >= 20


def test_a_call_that_raises_stops_no_other() -> None:
    events: list[int | str] = []

    def call(at: int) -> None:
        events.append(at)
        if at % 3 == 0:
            raise ValueError("of one request")

    run(20, call, events)
    assert [event for event in events if event != "turn"] == list(range(20))
