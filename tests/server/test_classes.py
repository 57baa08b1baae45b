"""Attainment, slack and prediction error by request class: hand-computed, and over HTTP on a real engine."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.classes import ERRORS, PHASES, SLACK, Tallies
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import ANSWER, NO_SLO, SLO, THINKING
from jaxserve.sched.api.thinking import ThinkingEnd
from tests.support.server.double import Double
from tests.support.timing import until

Series = dict[tuple[str, str, str], float]  # (name, class, phase or bucket bound) -> value
BODY = {"prompt": "def main(args):", "max_tokens": 6, "ignore_eos": True}
LONG = 600_000  # ms: longer than any test


def test_usage_has_the_prediction(live: Any) -> None:
    made = live.http.post("/v1/completions", json={**BODY, "ttft_slo_ms": LONG, "tpot_slo_ms": LONG}).json()
    slo = made["usage"]["slo"]
    assert slo["attained"] and slo["predicted_ttft_ms"] > 0 < slo["ttft_ms"]


def done(slo: SLO, times: list[float], reason: str = "length", thinks: int = 0) -> Request:
    """Return a request of class `a` that arrived at 0, with its first `thinks` tokens thinking."""
    end = ThinkingEnd([(7,)]) if thinks else None
    made = Request(0, NewRequest([1], SamplingParams(), slo), 0.0, thinking=end, class_="a")
    for number, at in enumerate(times, 1):
        made.pending = 1
        made.budget += made.tpot  # of the next token
        made.gain(7 if number == thinks else 1, at)
    made.finish_reason = reason
    return made


def tallied(*requests: Request, error: float | None = None) -> Any:
    tallies = Tallies(["a", "b"])
    for one in requests:
        tallies.add(one, error)
    assert set(tallies.stats()["b"].ended.values()) == {0}
    return tallies.stats()["a"]


@pytest.mark.parametrize(
    ("slo", "times", "ended", "attained"),
    [
        (SLO(2.0, 0.1), [1.0, 1.1], "ttft tpot all", "ttft tpot all"),
        (SLO(2.0, 0.1), [2.5, 2.6], "ttft tpot all", "tpot"),
        (SLO(2.0, 0.1), [1.0, 1.2], "ttft tpot all", "ttft"),
        (SLO(2.0, 0.1, tbt=0.15), [1.0, 1.0, 1.2], "ttft tpot tbt all", "ttft tpot"),
        (SLO(2.0, 0.1, tbt=0.15), [1.0, 1.1, 1.2], "ttft tpot tbt all", "ttft tpot tbt all"),
        (SLO(2.0, 0.01, tbt=0.15), [1.0, 1.1, 1.2], "ttft tpot tbt all", "ttft tbt"),
        (SLO(2.0, 0.1, tbt=0.15), [1.0], "ttft tpot tbt all", "ttft tpot tbt all"),
        (SLO(inf, 0.1), [9.0, 9.1], "tpot all", "tpot all"),
        (NO_SLO, [9.0, 99.0], "", ""),
    ],
)
def test_objectives_and_their_attainment_are_counted(slo: SLO, times: list[float], ended: str, attained: str) -> None:
    seen = tallied(done(slo, times))
    assert seen.ended == {phase: int(phase in ended.split()) for phase in PHASES}
    assert seen.attained == {phase: int(phase in attained.split()) for phase in PHASES}


def test_sizes_of_prompts_are_told_apart() -> None:
    """A class of requests with objectives of their own may hide that long prompts starve."""
    tallies = Tallies(["a", BEST_EFFORT])
    for length, ttft, class_ in ((10, 1.0, "a"), (9_000, 1.0, "a"), (9_000, 3.0, "a"), (10, 3.0, BEST_EFFORT)):
        request = Request(0, NewRequest([1] * length, SamplingParams(), SLO(2.0)), 0.0, class_=class_)
        request.pending = 1
        request.gain(1, ttft)
        request.finish_reason = "length"
        tallies.add(request, None)
    sizes = {name: (one.ended, one.attained) for name, one in tallies.by_prompt().items() if one.ended}
    assert sizes == {"<4K": (1, 1), "4-16K": (2, 1)}, "best effort is apart"
    stats = replace(Double().stats(), classes=tallies.stats(), by_prompt=tallies.by_prompt(), finished={"length": 9})
    assert (stats.promised, stats.attained, stats.attainment) == (3, 2, 2 / 3)


def test_a_request_that_ended_early_attains_nothing() -> None:
    for reason in ("error", "refused"):
        seen = tallied(done(SLO(2.0, 0.1, tbt=0.5), [1.0, 1.1], reason))
        assert seen.ended == dict.fromkeys(PHASES, 1) and seen.attained == dict.fromkeys(PHASES, 0)
        assert not any(slack.count for slack in seen.slack.values()), "the request has no last token"


def test_slack_is_the_rest_of_each_objective() -> None:
    seen = tallied(done(SLO(2.0, 0.1, tbt=0.15), [1.4, 1.5, 1.7]))
    left = {phase: spread.total for phase, spread in seen.slack.items()}
    assert left == pytest.approx({"ttft": 0.6, "tpot": 2 * 0.1 - 0.3, "tbt": 0.15 - 0.2})
    for spread in seen.slack.values():
        [place] = [at for at, size in enumerate(spread.sizes) if size]
        assert SLACK[place - 1] < spread.total <= SLACK[place]
    staged = SLO(2.0, 9.0, stages=((THINKING, 0.1), (ANSWER, 0.5)))
    seen = tallied(done(staged, [1.0, 1.1, 1.2, 1.7], thinks=3))
    assert seen.slack["tpot"].total == pytest.approx(2 * 0.1 + 0.5 - 0.7)
    assert not seen.slack["tbt"].count and not tallied(done(NO_SLO, [1.0, 2.0])).slack["ttft"].count
    assert not tallied(done(SLO(2.0), [1.0])).slack["tpot"].count, "a single token has no time per token"


def test_prediction_errors_are_relative() -> None:
    assert not tallied(done(SLO(), [1.0])).errors.count
    seen = tallied(done(SLO(), [1.0]), done(SLO(), [2.0]), error=0.5)
    assert seen.errors.total == 1.0 and seen.errors.sizes[ERRORS.index(0.5)] == 2


def scrape(live: Any) -> Series:
    """Return the series that have a class."""
    made: Series = defaultdict(float)
    for sample in live.samples():
        if "slo_class" in sample.labels or sample.name == "jaxserve:slo_violations_total":
            other = sample.labels.get("phase", "") + sample.labels.get("le", "")
            made[sample.name.removeprefix("jaxserve:"), sample.labels.get("slo_class", ""), other] += sample.value
    return made


def gained(live: Any, *bodies: dict[str, Any], status: int = 200) -> Series:
    """Send these requests and return the increase of each series."""
    live.quiet()
    before = scrape(live)
    for body in bodies:
        answer = live.http.post("/v1/completions", json={**BODY, **body})
        assert answer.status_code == status, answer.text
    live.quiet()
    return {key: value - before[key] for key, value in scrape(live).items() if value != before[key]}


def test_requests_are_counted_in_their_class(live):
    loose = {"ttft_slo_ms": LONG, "tpot_slo_ms": LONG}
    got = gained(
        live,
        {**loose, "service_tier": "interactive"},
        {**loose, "service_tier": "batch", "n": 2},
        loose,
        {**loose, "tpot_slo_ms": 0.001},
        {"service_tier": "best_effort"},
    )
    counts = {key[1:]: value for key, value in got.items() if key[0] == "slo_requests_total"}
    want = {"interactive": 1, "batch": 2, "custom": 2}
    assert counts == {(name, phase): count for name, count in want.items() for phase in ("ttft", "tpot", "all")}
    kept = {key[1:]: value for key, value in got.items() if key[0] == "slo_attained_total"}
    assert kept == {**counts, ("custom", "tpot"): 1, ("custom", "all"): 1}
    assert got["request_slack_seconds_count", "interactive", "ttft"] == 1
    assert ("request_slack_seconds_bucket", "interactive", "ttft60.0") not in got, "minutes of slack are left"
    assert got["request_slack_seconds_bucket", "interactive", "ttft+Inf"] == 1
    assert got["request_slack_seconds_bucket", "custom", "tpot0.0"] == 1, "one request was late"
    assert not any(name == "best_effort" for kind, name, _ in got if kind.startswith("request_slack"))
    predicted = {key[1]: value for key, value in got.items() if key[0] == "ttft_prediction_error_count"}
    assert predicted == want, "the first token of every request with an objective"


def test_ttft_prediction_errors_are_relative(live, monkeypatch):
    monkeypatch.setattr(live.engine._cluster._router, "predicted_first_token", lambda request: request.arrival + 1e6)
    got = gained(live, {}, {"service_tier": "batch", "n": 2}, {"service_tier": "best_effort"})
    counts = {key[1]: value for key, value in got.items() if key[0] == "ttft_prediction_error_count"}
    assert counts == {"default": 1, "batch": 2}, "the TTFT of best effort is not predicted"
    total = got["ttft_prediction_error_sum", "batch", ""]
    assert total > 1e6 / 60, "a prediction of 1e6 s"
    assert got["ttft_prediction_error_bucket", "batch", "+Inf"] == 2
    assert ("ttft_prediction_error_bucket", "batch", f"{float(ERRORS[-1])}") not in got


def test_requests_without_a_class_are_default(live):
    assert gained(live, {})["slo_requests_total", "default", "all"] == 1
    assert gained(live, {"service_tier": "auto"})["slo_requests_total", "default", "all"] == 1
    assert gained(live, {"service_tier": "auto", "ttft_slo_ms": LONG})["slo_requests_total", "custom", "all"] == 1


def test_long_gaps_count_as_one_violation_per_request(live):
    loose = {"ttft_slo_ms": LONG, "tpot_slo_ms": LONG}
    tight = {**loose, "tbt_slo_ms": 0.0001}
    got = gained(live, tight, {**tight, "n": 2}, loose)
    assert {key[2]: value for key, value in got.items() if key[0] == "slo_violations_total"} == {"tbt": 3}
    assert got["slo_requests_total", "custom", "tbt"] == 3 and ("slo_attained_total", "custom", "tbt") not in got
    assert got["slo_attained_total", "custom", "all"] == 1 and got["slo_attained_total", "custom", "tpot"] == 4
    got = gained(live, {**loose, "tbt_slo_ms": LONG}, {**loose, "tpot_slo_ms": 0.001, "tbt_slo_ms": LONG})
    assert {key[2]: value for key, value in got.items() if key[0] == "slo_violations_total"} == {"tpot": 1}
    assert got["slo_attained_total", "custom", "tbt"] == 2


def test_clients_cannot_make_classes(live):
    names = ServeConfig().classes.names
    assert set(names) == {"interactive", "priority", "agent", "batch", "best_effort", "default", "custom"}
    gained(live, *({"service_tier": f"mine-{n}"} for n in range(5)), status=400)
    gained(live, *({"ttft_slo_ms": 100.5 + n, "user": f"u{n}", "metadata": {"class": str(n)}} for n in range(5)))
    ended: list[Delta] = []
    for n in range(5):  # a program in the same process is not checked by the server
        live.engine.submit(
            NewRequest([5, 6, 7], SamplingParams(max_tokens=1), SLO(1.0 + n), tier=f"theirs-{n}", key=f"k{n}"),
            ended.append,
        )
    until(lambda: len(ended) >= 5)
    live.quiet()
    seen = scrape(live)
    assert {name for kind, name, _ in seen if kind == "slo_requests_total"} == set(names)
    assert {name for _, name, _ in seen} <= {*names, ""} and len(ended) == 5
    most = len(names) * (2 * len(PHASES) + 3 * (len(SLACK) + 3) + len(ERRORS) + 3)
    assert sum(name != "" for _, name, _ in seen) <= most
