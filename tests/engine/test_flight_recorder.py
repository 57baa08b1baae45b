"""The flight recorder tells the same about a request as a record of the whole run does, within bounds, per client."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from jaxserve.engine.runtime import condensed_steps, flight_recorder
from jaxserve.engine.runtime.flight_recorder import FlightRecorder, RequestLife
from jaxserve.report.request_timeline import request_timeline
from jaxserve.sched.api.log import Log
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.recorded.explain import explain
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.sim import Arrival, Options, Report, simulate
from tests.support.sched.presets import CHAT, TINY


class Both(Recorder):
    """Records a simulation in both ways. clients: of requests, by their number."""

    def __init__(self, clients: tuple[str, ...] = ("",)) -> None:
        super().__init__()
        self.clients = clients

    def instance(self, name: str, limits: Limits, now: Callable[[], float], then: Log) -> Log:
        if not self.limits:
            self.flight = FlightRecorder(now)
        log = self.flight.instance(name, super().instance(name, limits, now, then))

        def named(kind: str, **fields: Any) -> None:
            if kind == "add":
                request: Request = fields["request"]
                client = self.clients[request.id % len(self.clients)]
                request.asked = replace(request.asked, client=client)
            log(kind, **fields)

        return named

    def attach(self, name: str, scheduler: Scheduler) -> None:
        super().attach(name, scheduler)
        self.flight.attach(name, scheduler)

    def end(self) -> None:
        """Tell the recorder which requests have ended, as an engine does."""
        for request in self.requests.values():
            self.flight.finished(request, 0.25)


def flown(
    mesh: str = "4x1", policy: str = "kairos", clients: tuple[str, ...] = ("",), **options: Any
) -> tuple[Both, Report]:
    both = Both(clients)
    report = simulate(CHAT, policy, mesh, TINY, qps=60, num_requests=60, recorder=both, options=Options(**options))
    both.end()
    return both, report


def over_the_wire(life: RequestLife) -> RequestLife:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(life), type=RequestLife)


@pytest.mark.parametrize(
    ("mesh", "policy", "admission"),
    [("1x1", "kairos", "none"), ("4x1", "kairos", "none"), ("1x1", "slos_serve", "none"), ("1x1", "distserve", "dp")],
)
def test_it_explains_as_a_record_of_the_whole_run(mesh: str, policy: str, admission: str) -> None:
    both, report = flown(mesh, policy, admission=admission)
    demotions = [event.request for event in both.flight.recent(0).events if event.kind == "demotion"]
    assert sorted(map(str, demotions)) == sorted(map(str, both.demoted))
    assert len(demotions) == report.counters.demotions > 0 or policy == "kairos"
    for id in both.requests:
        life = both.flight.life(id)
        assert life is not None
        assert explain(over_the_wire(life).recorder(), id) == explain(both, id)


def test_lines_agree_with_the_report() -> None:
    both, report = flown()
    recent = both.flight.recent(0)
    lines = {line.id: line for line in recent.requests}
    assert lines.keys() == both.requests.keys()
    for measured in report.measured:
        line = lines[measured.id]
        found = line.prompt, line.output, line.ttft, line.attained
        assert found == (measured.prompt, measured.output, measured.ttft, measured.attained)
    moves = [event for event in recent.events if event.kind == "move"]
    assert len(moves) == len(both.moves) > 0
    numbers = [one.number for one in (*recent.events, *recent.requests)]
    assert len(set(numbers)) == len(numbers) and max(numbers) == recent.number


def test_only_what_is_new_is_returned() -> None:
    both, _ = flown()
    recent = both.flight.recent(0)
    middle = recent.requests[30].number
    later = both.flight.recent(middle)
    assert [line.number for line in later.requests] == [line.number for line in recent.requests[31:]]
    assert all(event.number > middle for event in later.events)
    assert both.flight.recent(recent.number) == (recent.number, (), ())
    assert both.flight.recent(recent.number + 1) == recent, "a number of an earlier start"


def test_bars_cover_what_the_words_say() -> None:
    both, report = flown("1x1")
    late = max(report.measured, key=lambda one: one.ttft)
    found = request_timeline(both, late.id)
    assert found["first_token"] == pytest.approx(late.ttft)
    prefill = [bar for bar in found["bars"] if bar["kind"] == "prefill"]
    assert sum(bar["tokens"] for bar in prefill) >= late.prompt
    assert all(bar["start"] >= 0 and bar["end"] <= found["last_token"] + 1e-9 for bar in prefill)
    assert any(bar["kind"] == "other" for bar in found["bars"]), "it waited for others"
    assert not any("key" in bar for bar in found["bars"])


def test_a_request_is_known_before_it_ends() -> None:
    both = Both()
    simulate(CHAT, "kairos", "1x1", TINY, qps=60, num_requests=5, recorder=both)
    assert both.flight.recent(0).requests == ()
    life = both.flight.life(3)
    assert life is not None and explain(life.recorder(), 3) == explain(both, 3)


def test_what_is_recorded_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "STEPS", 5)
    monkeypatch.setattr(flight_recorder, "REQUESTS", 5)
    monkeypatch.setattr(flight_recorder, "KNOWN", 10)
    both, _ = flown()
    assert len(both.flight.recent(0).requests) == 5
    first, *_, last = both.requests
    assert both.flight.life(first) is None
    ended = both.flight.recent(0).requests[-1].id
    life = both.flight.life(ended)
    assert life is not None
    lives = [both.flight.life(one.id) for one in both.flight.recent(0).requests]
    assert all(one is not None and len(one.steps) <= 5 for one in lives)
    assert any(one is not None and len(one.token_times) > 10 for one in lives), "without the bound, more steps"
    assert explain(life.recorder(), ended)[0] == explain(both, ended)[0]
    both.flight.clear()
    assert both.flight.recent(0) == (0, (), ()) and both.flight.life(last) is None


def test_a_late_request_is_explained_without_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "STEPS", 0)
    both, report = flown("1x1")
    late = max(report.measured, key=lambda one: one.ttft)
    both.flight.finished(both.requests[late.id], None)
    life = both.flight.life(late.id)
    assert life is not None
    ended = replace(life, slo=SLO(late.ttft / 2, 0.05))
    assert "no longer recorded" in request_timeline(ended.recorder(), late.id)["lines"][-1]


def shortly(lines: list[str]) -> list[str]:
    """Return lines without the number of steps of others, and how their time is split."""
    return [re.sub(r"worked .*|\d+ steps ran", "", line) for line in lines]


@pytest.mark.parametrize("mesh", ["1x1", "4x1"])
def test_spans_of_other_requests_are_bounded(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both, _ = flown(mesh)
    lives = [life for id in both.requests if (life := both.flight.life(id)) is not None]

    def spans() -> int:
        return sum(len(one.plan.spans) for life in lives for one in life.recorder().stretches)

    full = spans()
    assert full < sum(one.spans for life in lives for one in life.steps), "what says nothing is left out"
    monkeypatch.setattr(condensed_steps, "SPANS", 0)
    assert spans() < full, "neighboring steps are joined"
    for life in lives:
        assert shortly(explain(life.recorder(), life.id)) == shortly(explain(both, life.id))


def test_a_request_without_a_token_ends_when_it_is_given_up() -> None:
    both = Both()
    simulate(CHAT, "kairos", "1x1", TINY, qps=60, num_requests=20, recorder=both)
    given_up = both.requests[3]
    given_up.token_times.clear()
    given_up.finish_reason = "abort"
    end = both.flight._now()
    both.flight.finished(given_up, None)
    life = both.flight.life(3)
    assert life is not None and life.ended == end > life.arrival
    [line] = both.flight.recent(0).requests
    assert line.ago == 0


def test_a_client_sees_its_own_requests_only() -> None:
    both, report = flown("1x1", clients=("alice", "bob"))
    late = max((one for one in report.measured if one.id % 2 == 0), key=lambda one: one.ttft)
    assert both.flight.life(late.id, "bob") is None
    life = both.flight.life(late.id, "alice")
    assert life is not None
    words = "\n".join(explain(life.recorder(), late.id))
    assert "for requests of other clients" in words
    named = [int(part.split()[0]) for part in words.split("for request ")[1:]]
    assert named and all(id % 2 == 0 for id in named)


def test_a_stage_with_an_objective_of_its_own_counts() -> None:
    both = Both()
    slo = SLO(1.0, 0.05, stages=(("thinking", 0.2),))
    simulate([Arrival(0.0, 40, 6, slo, thinking_tokens=3)], "distserve", "1x1", TINY, recorder=both)
    both.end()
    life = both.flight.life(0)
    assert life is not None
    assert request_timeline(life.recorder(), 0)["attained"] == request_timeline(both, 0)["attained"]
