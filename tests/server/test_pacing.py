"""Token pacing: early tokens are delayed to the objective's pace, late ones are not, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.slo import SLO
from jaxserve.sched.api.thinking import ThinkingEnd, ThinkingMarkers
from jaxserve.sched.sim.clock import VirtualLoop
from jaxserve.server.pacing import GLANCE, Pace, paced
from tests.support.timing import in_time, once_in_time, until

BODY = {"prompt": "def main(", "max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
TPOT = 0.08  # seconds: far longer than the demo model needs
END = 7  # the token that ends thinking

gaps = st.lists(st.floats(0, 0.2), min_size=1, max_size=30)


@given(gaps, st.floats(0.001, 0.2), st.one_of(st.none(), st.floats(0.001, 0.2)))
def test_a_token_waits_for_its_due_time_and_no_longer(gaps, tpot, tbt):
    ready = list(accumulate(gaps))
    pace = Pace(SLO(tpot=tpot, tbt=tbt))
    told = [pace.due(at, (1,)) for at in ready]
    gap = tpot if tbt is None else min(tpot, tbt)
    assert told == pytest.approx([max(at, ready[0] + k * gap) for k, at in enumerate(ready)])
    assert told == sorted(told) and all(at >= was for at, was in zip(told, ready, strict=True))
    if (mean := (ready[-1] - ready[0]) / max(1, len(ready) - 1)) > gap:
        assert told[-1] == ready[-1], f"{mean=}: a late token is delivered at once"
    assert pace.due(told[-1], ()) == told[-1], "the end is delivered with the last token"


@given(gaps, st.integers(0, 29), st.floats(0.001, 0.2), st.floats(0.001, 0.2))
def test_each_stage_has_its_pace(gaps, ends, thinking, answer):
    ready = list(accumulate(gaps))
    tokens = [END if k == ends else 1 for k in range(len(ready))]
    pace = Pace(SLO(tpot=1.0, stages=(("thinking", thinking), ("answer", answer))), ThinkingEnd([(END,)]))
    told = [pace.due(at, (token,)) for at, token in zip(ready, tokens, strict=True)]
    due = [ready[0] + min(k, ends) * thinking + max(0, k - ends) * answer for k in range(len(ready))]
    assert told == pytest.approx([max(pair) for pair in zip(ready, due, strict=True)])


def test_without_an_objective_no_token_waits():
    pace = Pace(SLO(ttft=inf, tpot=inf))
    assert [pace.due(at, (1,)) for at in (1.0, 1.0, 1.5)] == [1.0, 1.0, 1.5]


class Source:
    """Items at given times of the loop's clock."""

    def __init__(self, times: list[float], error: Exception | None = None) -> None:
        self.times, self.error, self.read, self.closed = times, error, 0, False

    async def __call__(self) -> AsyncGenerator[int, None]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            for number, at in enumerate(self.times):
                await asyncio.sleep(max(0.0, start + at - loop.time()))
                self.read += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def told(source: Source, tpot: float, **more: Any) -> list[tuple[float, int]]:
    """Return (time, item) as delivered by pacing on a virtual clock, relative to the start."""
    made: list[tuple[float, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        start, pace = loop.time(), Pace(SLO(tpot=tpot))
        async for item in paced(source(), lambda ready, _: pace.due(ready, (1,)), **more):
            made.append((loop.time() - start, item))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        try:
            runner.run(main())
        finally:
            assert source.closed
            told.last = made  # type: ignore[attr-defined]
    return made


@given(gaps, st.floats(0.001, 0.2))
def test_a_stream_on_a_virtual_clock(gaps, tpot):
    ready, held = list(accumulate(gaps)), list[float]()
    made = told(Source(ready), tpot, held=held.append)
    assert [item for _, item in made] == list(range(len(ready))), "an item is lost, repeated or out of order"
    due = [max(at, ready[0] + k * tpot) for k, at in enumerate(ready)]
    assert [at for at, _ in made] == pytest.approx(due, abs=1e-6)
    assert held == pytest.approx([at - was for at, was in zip(due, ready, strict=True)], abs=1e-6)


def test_a_failure_is_delivered_after_the_computed_tokens():
    with pytest.raises(ValueError, match="bad luck"):
        told(Source([0.0, 0.1, 0.2], ValueError("bad luck")), 1.0)
    assert told.last == [(pytest.approx(at, abs=1e-6), item) for at, item in ((0.0, 0), (0.2, 1), (0.2, 2))]


def test_hurrying_delivers_at_once():
    made = told(Source([0.0, 0.1, 0.2]), 1.0, hurry=lambda: True)
    assert [at for at, _ in made] == pytest.approx([0.0, 0.1, 0.2], abs=1e-6)


def test_a_hurry_that_begins_while_an_item_waits_ends_its_wait():
    began = list[float]()

    def hurry() -> bool:
        now = asyncio.get_running_loop().time()
        began.append(now)
        return now > began[0] + 2.0

    made = told(Source([0.0, 0.1]), 600.0, hurry=hurry)
    assert made[0][0] == 0.0 and 2.0 <= made[1][0] <= 2.0 + 2 * GLANCE


def test_closing_closes_the_source():
    source = Source([0.0, 0.1, 50.0])

    async def main() -> None:
        stream = paced(source(), lambda ready, item: ready + item)
        assert await anext(stream) == 0
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        assert source.read == 2, "the source is read while items wait"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await stream.aclose()
        assert source.closed and asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


# Over HTTP, with the demo model


def stream(live: Any, **more: Any) -> tuple[list[float], str, list[Any]]:
    """Return the times of the tokens, the whole text, and the finish reasons."""
    times, parts, reasons = list[float](), list[str](), list[Any]()
    body = {**BODY, "stream": True, **more}
    with live.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                parts.append(choice["text"])
                reasons.append(choice["finish_reason"])
    return times, "".join(parts), reasons


@once_in_time
def test_a_paced_stream_keeps_its_pace_without_slowing_the_engine(live):
    plain, text, _ = stream(live, tpot_slo_ms=1000 * TPOT)
    live.quiet()
    before = live.sums()
    times, paced_text, reasons = stream(live, tpot_slo_ms=1000 * TPOT, pace_tokens=True)
    after = live.sums()
    assert paced_text == text and [one for one in reasons if one] == ["length"]
    span = TPOT * (BODY["max_tokens"] - 1)
    in_time(times[-1] - times[0] > 0.9 * span, "the last token is due then")
    in_time(plain[-1] - plain[0] < 0.9 * span, "unpaced, it is faster")
    name = "request_decode_time_seconds_sum"
    in_time(after[name] - before[name] < 0.9 * span, "metrics measure computation, not delivery")
    held = "token_pacing_delay_seconds"
    assert after[held + "_count"] - before[held + "_count"] == BODY["max_tokens"]
    assert after[held + "_sum"] > before[held + "_sum"]


def test_the_engine_is_free_during_a_paced_stream(live):
    body = {**BODY, "stream": True, "tpot_slo_ms": 600_000, "pace_tokens": True}
    with live.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept, since httpx closes the stream with it
        next(lines)
        until(lambda: not live.engine.stats().running)
        assert live.service.active == 1, "the stream ended before its last token was delivered"
    live.quiet()  # the client disconnected with tokens still waiting


def test_a_stop_string_ends_a_paced_stream_and_its_computation(live):
    _, text, _ = stream(live)
    stop = text[4:7]
    times, cut, reasons = stream(live, stop=[stop], tpot_slo_ms=30, pace_tokens=True, max_tokens=100)
    assert cut == text[: text.index(stop)] and reasons[-1] == "stop" and times
    live.quiet()


def test_a_non_streamed_answer_is_not_delayed(live):
    before = live.sums()["token_pacing_delay_seconds_count"]
    made = live.http.post("/v1/completions", json={**BODY, "tpot_slo_ms": 5000, "pace_tokens": True}).json()
    assert made["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert live.sums()["token_pacing_delay_seconds_count"] == before


@once_in_time
def test_the_pace_starts_in_the_stage_at_the_end_of_the_prompt(fake):
    """The double repeats the prompt: two tokens of an open prompt are thinking, and the third ends it."""
    live = fake()
    live.engine.info = replace(live.engine.info, thinking=ThinkingMarkers(((5,),), ((6, END),)))
    slow, quick = {"tpot_slo_ms": 300}, {"tpot_slo_ms": 1}
    for prompt, thinking, answer, seconds in (
        ([6, END, 9], quick, slow, 0.9),  # closed
        ([6, END, 9], slow, quick, 0.0),
        ([6, END, 5], slow, quick, 0.3),  # open again: the pause before the second token, which closes it
        ([9, 9, 9], slow, quick, 0.9),  # never closed
    ):
        stages = {"thinking": thinking, "answer": answer}
        times, _, _ = stream(live, prompt=prompt, max_tokens=4, stage_slo=stages, pace_tokens=True)
        span = times[-1] - times[0]
        in_time(seconds - 0.1 <= span < seconds + 0.25, f"{span=} {prompt=} {thinking=}")


@once_in_time
def test_shutdown_does_not_wait_for_pacing(fake):
    live = fake(config={"pace_tokens": True})
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "stream": True, "tpot_slo_ms": 500}
    with live.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        begin = time.monotonic()
        live.call(live.ending.drain)
        rest = [line for line in lines if line]
    assert len(rest) == 10 and rest[-1] == "data: [DONE]", "8 more tokens, the finish reason and the end"
    in_time(time.monotonic() - begin < 3.0, "paced, it would take 4 s")


def test_chunks_of_several_tokens_are_delivered_one_by_one():
    from jaxserve.generation.generate import _each_token
    from jaxserve.sched.api.plan import Delta

    whole = Delta(3, (4, 5, 6), finish_reason="stop", stop_token=6)
    parts = _each_token(whole)
    assert [one.tokens for one in parts] == [(4,), (5,), (6,)]
    assert [one.finish_reason for one in parts] == [None, None, "stop"] and parts[-1].stop_token == 6
    assert all(before is not after for before, after in pairwise(parts))
