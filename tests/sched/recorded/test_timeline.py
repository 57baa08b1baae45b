"""The timeline and the described life of a request agree with the simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Decision, Grant, View
from jaxserve.sched.api.preemption import LEAD
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.recorded.explain import explain
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.recorded.timeline import trace
from jaxserve.sched.sim import Arrival, Options, Report, simulate
from tests.support.sched.presets import CHAT, TINY

QUIET = replace(TINY, noise=0.0)


def recorded(mesh: str, policy: str = "kairos", requests: int = 60, **options: Any) -> tuple[Recorder, Report]:
    recorder = Recorder()
    report = simulate(
        CHAT, policy, mesh, TINY, qps=60, num_requests=requests, recorder=recorder, options=Options(**options)
    )
    return recorder, report


def of(events: list[dict[str, Any]], kind: str, **wanted: Any) -> list[dict[str, Any]]:
    return [one for one in events if one["ph"] == kind and all(one.get(key) == wanted[key] for key in wanted)]


@pytest.mark.parametrize("mesh", ["1x1", "2x1", "4x1"])
def test_every_step_is_a_slice_and_none_overlaps(mesh: str) -> None:
    recorder, report = recorded(mesh)
    events = json.loads(json.dumps(trace(recorder)))["traceEvents"]
    slices = of(events, "X", cat="step")
    assert len(slices) == report.counters.steps
    names = {one["pid"]: one["args"]["name"] for one in of(events, "M", name="process_name")}
    assert tuple(names.values()) == report.instances
    for pid, name in names.items():
        own = sorted((one["ts"], one["ts"] + one["dur"]) for one in slices if one["pid"] == pid)
        assert all(end <= start + 0.01 for (_, end), (start, _) in pairwise(own))
        busy = sum(end - start for start, end in own) / 1e6
        assert busy == pytest.approx(report.busy[report.instances.index(name)] * report.ended, rel=1e-3)
    times = [one["ts"] for one in events if one["ph"] != "M"]
    assert times == sorted(times)


def test_arrows_lead_from_prefill_through_the_transfer_to_decode() -> None:
    recorder, report = recorded("4x1", requests=40)
    events = trace(recorder)["traceEvents"]
    moved = [one.id for one in report.measured if one.output > 1]
    ends = {kind: {one["id"]: one for one in of(events, kind)} for kind in "stf"}
    assert len(ends["s"]) == len(ends["t"]) == len(ends["f"]) == len(moved)
    slices = of(events, "X")
    for id, begin in ends["s"].items():
        middle, end = ends["t"][id], ends["f"][id]
        request = int(begin["name"].removeprefix("request "))
        at = [  # the slices that contain them
            next(
                one
                for one in slices
                if (one["pid"], one["tid"]) == (event["pid"], event["tid"])
                and one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
            )
            for event in (begin, middle, end)
        ]
        assert any(chunk.startswith(f"request {request}:") for chunk in at[0]["args"]["chunks"])
        assert at[1]["args"]["request"] == request
        assert str(request) in at[2]["args"]["rows"].split()
        assert begin["ts"] < middle["ts"] < end["ts"]


def life(recorder: Recorder, id: int) -> str:
    return "\n".join(explain(recorder, id))


def test_a_life_that_meets_its_slo() -> None:
    recorder = Recorder()
    [one] = simulate([Arrival(0.5, 40, 3, SLO(1.0, 0.1))], "distserve", "2x1", QUIET, recorder=recorder).measured
    told = life(recorder, 0)
    assert told.startswith("Request 0 (req-0): 40 prompt tokens, 3 tokens of output; promised the first within 1.00 s")
    assert "0.000 s  arrived, and was given to prefill0 (no prompt ahead)" in told
    assert f"prefill0 computed tokens 0 to 40 in {1e3 * one.ttft:.3g} ms" in told
    assert "its KV went from prefill0 to decode1" in told and "decode1 decoded it in 2 steps" in told
    assert told.endswith("Attained both objectives.") and "waited" not in told


def test_a_life_that_waits_for_a_long_prompt() -> None:
    slow = replace(QUIET, kv_tokens=4000)
    arrivals = [Arrival(0.0, 3000, 2), Arrival(0.01, 10, 2, SLO(0.05, 1.0), "", "short")]
    recorder = Recorder()
    report = simulate(arrivals, "distserve", "1x1", slow, recorder=recorder)
    late = report.measured[1].ttft - 0.05
    told = life(recorder, 1)
    assert "waited" in told and "for request 0 (prompt 3,000)" in told
    assert f"Missed TTFT by {1e3 * late:.3g} ms" in told and "Missed TPOT" not in told


def test_a_life_with_slow_tokens() -> None:
    arrivals = [Arrival(0.0, 20, 8, SLO(1.0, 1e-4)), Arrival(0.0, 30, 8)]
    recorder = Recorder()
    report = simulate(arrivals, "distserve", "2x1", QUIET, recorder=recorder)
    told = life(recorder, 0)
    assert f"Missed TPOT: {1e3 * report.measured[0].tpot:.3g} ms a token, promised 0.1 ms" in told
    assert "had 2 requests" in told and "Missed TTFT" not in told


class Stops:
    """A policy that preempts the running prompt step for a shorter new prompt, then resumes it."""

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision(preempt=True)
        rows = sorted([*view.prefill, *view.decode], key=lambda one: one.prompt_length)
        if not rows and view.suspended:
            return Decision(resume=view.suspended[0].step)
        return Decision(tuple(Grant(one.id, one.remaining) for one in rows[:1]))


def test_a_life_that_is_preempted() -> None:
    device = replace(QUIET, kv_tokens=4000, layers=20)
    arrivals = [Arrival(0.0, 3000, 1), Arrival(0.1, 10, 1)]
    recorder = Recorder()
    report = simulate(arrivals, Stops, "1x1", device, recorder=recorder)
    assert report.policy == "Stops" and report.summary.reasons == {"stop": 2}
    stopped = [one for one in recorder.stretches if one.stopped]
    assert len(stopped) == 1 and 0.1 <= stopped[0].end <= 0.1 + LEAD + 0.35 / 20
    told = life(recorder, 0)
    assert "computed part of tokens 0 to 3,000" in told and "stopped at a segment boundary, waited" in told
    names = [one["name"] for one in of(trace(recorder)["traceEvents"], "X")]
    assert names == ["prefill 3000, stopped", "prefill 10", "prefill 3000"]


def test_a_long_life_is_described_in_few_lines() -> None:
    recorder = Recorder()
    device = replace(QUIET, kv_tokens=4000)
    simulate([Arrival(0.0, 2000, 1)], "distserve", "1x1", device, recorder=recorder, options=Options(tokens=20))
    told = explain(recorder, 0)
    assert len(recorder.stretches) == 100 and len(told) == 1 + 1 + 12 + 1 + 12 + 2 + 1
    assert any("… 76 more chunks and waits …" in line for line in told)
    assert any("tokens 1,980 to 2,000" in line for line in told)


def test_lives_that_end_early() -> None:
    arrivals = [Arrival(0.0, 500, 5), Arrival(0.0, 10, 10_000), Arrival(0.0, 10, 1)]
    recorder = Recorder()
    simulate(arrivals, "distserve", "1x1", QUIET, recorder=recorder, options=Options(horizon=0.02))
    assert "no instance took it" in life(recorder, 0) and "does not fit" in life(recorder, 0)
    assert "the run ended before it" in life(recorder, 1)
    with pytest.raises(InvalidValue, match="request 7 must be one of those that arrived: 0 to 2"):
        explain(recorder, 7)
