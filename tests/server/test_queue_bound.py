"""The queue bound of the real engine, since its double has its own."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from jaxserve import LLM, SLO, InvalidValue, QueueFull, SamplingParams
from jaxserve.config import ServeConfig
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.plan import Delta


def test_the_queue_holds_as_many_requests_as_its_bound(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's loop is blocked, so that submitted requests stay in the queue."""
    held, going, params = threading.Event(), threading.Event(), SamplingParams(max_tokens=1, ignore_eos=True)
    ended: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def hold() -> None:
        held.set()
        assert going.wait(30)

    def submit() -> int:
        return int(engine.submit(NewRequest([5, 6, 7], params, SLO()), ended.put))

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


@pytest.mark.parametrize(
    ("prompts", "n", "outputs"), [(["a"], 4, None), (["a", "b"], 2, None), (["a"], 5, 5), (["a"] * 5, 1, 5)]
)
def test_more_outputs_than_the_queue_bound_are_400(
    live: Any, monkeypatch: pytest.MonkeyPatch, prompts: list[str], n: int, outputs: int | None
) -> None:
    for one in (live.engine, live.service.engine):
        monkeypatch.setattr(one._queue, "bound", 4)
    answer = live.http.post("/v1/completions", json={"prompt": prompts, "n": n, "max_tokens": 1})
    if outputs is None:
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 4
        return
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "n" and "Retry-After" not in answer.headers
    assert (
        f"are {outputs} outputs, and at most 4 may wait (max_num_queued_reqs=4 for each of 1 inst" in error["message"]
    )


def test_more_outputs_than_the_queue_bound_are_refused_offline(
    engine: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(config=ServeConfig(), engine=engine, tokenizer_object=tokenizer)
    monkeypatch.setattr(engine._queue, "bound", 4)
    params = SamplingParams(n=4, max_tokens=1, ignore_eos=True)
    assert [len(one.outputs) for one in llm.generate(["a", "b"], params)] == [4, 4]
    with pytest.raises(InvalidValue, match="n=5 are 5 outputs, and at most 4"):
        llm.generate("a", SamplingParams(n=5, max_tokens=1))
