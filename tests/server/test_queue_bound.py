"""The engine's bounded queue: the real engine, since its double has a bound of its own."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from jaxserve import SLO, QueueFull, SamplingParams
from jaxserve.sched.plan import Delta


def test_the_engine_lets_as_many_requests_wait_as_its_bound_says(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's loop is held up, so that what is handed in stays in the queue."""
    held, going, params = threading.Event(), threading.Event(), SamplingParams(max_tokens=1, ignore_eos=True)
    ended: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def hold() -> None:
        held.set()
        assert going.wait(30)

    def submit() -> int:
        return int(engine.submit([5, 6, 7], params, slo=SLO(), on_delta=ended.put))

    monkeypatch.setattr(engine._queue, "bound", 3)
    engine._loop.call_soon_threadsafe(hold)
    try:
        assert held.wait(30)
        for _ in range(3):
            submit()
        with pytest.raises(QueueFull):
            submit()
    finally:
        going.set()
    assert {ended.get(timeout=30).finish_reason for _ in range(3)} == {"length"}
    submit()  # there is room again
    assert ended.get(timeout=30).finish_reason == "length"
