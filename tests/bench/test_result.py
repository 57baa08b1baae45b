"""Figures computed from hand-made outcomes."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from jaxserve.bench import result
from jaxserve.bench.client import Outcome
from jaxserve.bench.drive import Run, find_goodput
from jaxserve.bench.load import NONE, Call, Objective
from jaxserve.bench.plots import distribution, share_at
from jaxserve.bench.result import Goals
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.metrics import measure


def outcome(ttft: float, gaps: list[float], slo: Objective = NONE, at: float = 0.0, error: str = "") -> Outcome:
    call = Call(at, (1,) * 10, 10, len(gaps) + 1, slo)
    return Outcome(call, at, ttft, ttft + sum(gaps), gaps, 10, len(gaps) + 1, error)


GOALS = Goals.parse(["ttft:500", "tpot:50"])
GOOD = outcome(0.4, [0.04, 0.06])
LATE = outcome(0.6, [0.01])
SLOW = outcome(0.1, [0.08, 0.08])
ONE = outcome(0.2, [])
FAILED = outcome(0.0, [], error="HTTP 503")


def test_goodput_counts_requests_that_meet_all_objectives() -> None:
    found = result.summary([GOOD, LATE, SLOW, ONE, FAILED], 2.0, goals=GOALS)
    assert (found["completed"], found["failed"]) == (4, 1)
    assert found["request_goodput"] == pytest.approx(1.0)  # GOOD and ONE in 2 s
    assert found["slo_attainment"] == pytest.approx(2 / 5)  # of the requests sent
    assert found["slo_attainment_by_metric"] == pytest.approx({"ttft": 3 / 5, "tpot": 3 / 5})
    assert found["total_input_tokens"] == 40 and found["total_output_tokens"] == 3 + 2 + 3 + 1
    assert found["output_throughput"] == pytest.approx(4.5)
    assert found["total_token_throughput"] == pytest.approx(24.5)
    assert found["request_throughput"] == pytest.approx(2.0)


def test_mean_latencies_match_vllms_definitions() -> None:
    found = result.summary([GOOD, LATE, SLOW, ONE, FAILED], 2.0, goals=Goals(), percentiles=(50.0, 99.0, 99.9))
    assert found["mean_ttft_ms"] == pytest.approx((400 + 600 + 100 + 200) / 4)
    assert found["mean_tpot_ms"] == pytest.approx((50 + 10 + 80) / 3)  # requests with one token have none
    assert found["mean_itl_ms"] == pytest.approx((40 + 60 + 10 + 80 + 80) / 5)
    assert found["mean_e2el_ms"] == pytest.approx((500 + 610 + 260 + 200) / 4)
    assert found["p50_ttft_ms"] == found["median_ttft_ms"] == pytest.approx(300)
    assert {"p99_tpot_ms", "p99.9_itl_ms", "std_e2el_ms", "p99_client_lag_ms"} <= set(found)
    assert found["request_goodput"] is None and "slo_attainment" not in found


def test_a_requests_own_objective_overrides_that_of_the_run() -> None:
    lenient = outcome(0.6, [0.2], Objective(1000.0, 250.0, "batch"))
    strict = outcome(0.2, [0.02], Objective(100.0, None, "chat"))
    found = result.summary([lenient, strict, GOOD], 1.0, goals=GOALS)
    assert found["slo_attainment"] == pytest.approx(2 / 3)
    assert found["slo_attainment_by_class"] == {"batch": 1.0, "chat": 0.0}


def test_the_largest_gap_is_compared_to_its_objective() -> None:
    tight = outcome(0.1, [0.01, 0.2, 0.01], Objective(500.0, 100.0, "tight", tbt_slo_ms=100.0))
    loose = outcome(0.1, [0.01, 0.2, 0.01], Objective(500.0, 100.0, "loose", tbt_slo_ms=300.0))
    found = result.summary([tight, loose], 1.0, goals=Goals())
    assert found["slo_attainment_by_class"] == {"loose": 1.0, "tight": 0.0}
    assert found["slo_attainment_by_metric"] == {"tbt": 0.5, "tpot": 1.0, "ttft": 1.0}
    assert found["request_goodput"] == 1.0
    assert Goals.parse(["tbt:150"]).kept(outcome(0.1, [0.2])) == {"tbt": False}
    assert Goals.parse(["tbt:150"]).kept(outcome(0.1, [])) == {"tbt": True}


def test_stages_are_left_for_the_server_to_evaluate() -> None:
    staged = outcome(0.1, [0.9], Objective(500.0, 10.0, "reason", stages=(("thinking", 20.0),)))
    assert Goals.parse(["tpot:50"]).of(staged) == {"ttft": 500.0}
    tier = outcome(0.1, [0.9], Objective(service_tier="interactive", name="tier"))
    assert Goals().of(tier) == {} and Goals.parse(["ttft:50"]).kept(tier) == {"ttft": False}


def test_attainment_by_prompt_length_shows_sacrificed_requests() -> None:
    long = outcome(9.0, [0.01])
    long.prompt_tokens = 20_000
    found = result.summary([GOOD, ONE, ONE, long], 1.0, goals=GOALS)
    assert found["slo_attainment"] == pytest.approx(3 / 4)
    assert found["slo_attainment_by_prompt_length"] == {"<4K": 1.0, "16-64K": 0.0}
    assert found["slo_attainment_token_weighted"] == pytest.approx(30 / 20_030)


@pytest.mark.parametrize("seen", [GOOD, LATE, SLOW, ONE])
def test_the_simulator_measures_the_same(seen: Outcome) -> None:
    slo = SLO(ttft=0.5, tpot=0.05)
    request = Request(0, NewRequest(seen.call.prompt, SamplingParams(), slo), seen.start)
    request.finish_reason = "length"
    request.token_times = [seen.start + at for at in itertools.accumulate([seen.ttft, *seen.itls])]
    simulated, here = measure(request), result.measured(0, seen, GOALS.kept(seen))
    assert here.ttft == pytest.approx(simulated.ttft)
    assert here.tpot == pytest.approx(simulated.tpot, nan_ok=True)
    assert here.largest_gap == pytest.approx(simulated.largest_gap, nan_ok=True)
    assert (here.ttft_attained, here.tpot_attained) == (simulated.ttft_attained, simulated.tpot_attained)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:5", "ttft:-1", "ttft:nan"])
def test_invalid_goals_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="goodput"):
        Goals.parse([text])


def test_a_run_without_success_has_no_latencies() -> None:
    found = result.summary([FAILED, FAILED], 1.0, goals=GOALS)
    assert found["completed"] == 0 and found["mean_ttft_ms"] == 0.0 and found["slo_attainment"] == 0.0
    assert result.errors([FAILED, FAILED, GOOD]) == ["2 × HTTP 503"]


def test_attainment_grows_with_looser_objectives() -> None:
    run = Run((GOOD, LATE, SLOW, ONE, FAILED), 1.0)
    shares = [share_at(run, GOALS, scale) for scale in (0.1, 1.0, 1.3, 10.0)]
    assert shares == pytest.approx([0.0, 0.4, 0.6, 0.8])


def test_distributions_are_thinned() -> None:
    line = distribution([float(i) for i in range(1000)])
    assert len(line.x) == 50 and (line.x[0], line.y[0]) == (0.0, 0.001) and (line.x[-1], line.y[-1]) == (999.0, 1.0)
    assert list(distribution([]).x) == [] and list(distribution([3.0]).y) == [1.0]


@pytest.mark.parametrize("start", [0.5, 1.0, 7.0, 100.0])
@pytest.mark.parametrize("truth", [0.7, 3.3, 42.0])
def test_the_search_finds_the_highest_rate(start: float, truth: float) -> None:
    async def measure(rate: float) -> float:
        return 1.0 if rate <= truth else 0.5

    peak, probes = asyncio.run(find_goodput(measure, start=start, most=40))
    assert truth / 1.05 <= peak <= truth
    assert len(probes) == len({probe.rate for probe in probes})


def test_the_search_gives_up() -> None:
    async def never(rate: float) -> float:
        return 0.0

    peak, probes = asyncio.run(find_goodput(never, start=1.0, most=5))
    assert peak == 0.0 and [probe.rate for probe in probes] == [1.0, 0.5, 0.25, 0.125, 0.0625]
