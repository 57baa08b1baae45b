"""First tokens as predicted when prompts are placed, and as they come; who is counted as deflected or demoted."""

from __future__ import annotations

from math import inf, isnan

import pytest

from jaxserve.sched.forecasts import Forecasts
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.policy import Role
from jaxserve.sched.request import BEST_EFFORT, Request
from jaxserve.sched.sim import Arrival, Latency, Mesh, Options, Report, simulate
from jaxserve.sched.slo import SLO

EXACT = Coefficients(1e-3, 1e-4, 1e-5, 0.0, 0.0, 0.0)
TINY = Latency("tiny", kv_bytes_per_token=1000, kv_tokens=4000, page_size=4, coefficients=EXACT, link_bandwidth=1e9)


def request(first: float | None, tier: str = "standard") -> Request:
    made = Request(3, range(5), SamplingParams(max_tokens=4), SLO(), 10.0, tier=tier)
    made.first_token_at = first
    return made


def test_errors_are_shares_of_what_was_measured() -> None:
    forecasts = Forecasts()
    assert isnan(forecasts.accuracy["decode"].mape)
    forecasts.note(3, Role.PREFILL, 10.5)
    forecasts.note(3, Role.DECODE, 11.0)  # moved: the last one counts
    assert forecasts.error(request(12.0)) == 0.5 and forecasts.error(request(10.5)) == 1.0
    forecasts.over(request(12.0))
    assert forecasts.error(request(12.0)) is None
    forecasts.over(request(12.0))  # nobody said anything of this one
    assert forecasts.accuracy["prefill"].median is None
    forecasts.note(3, Role.MIXED, 14.0)
    forecasts.over(request(12.0))
    assert forecasts.accuracy["prefill"].median == 1.0
    assert forecasts.accuracy["decode"].mape == 0.5 and forecasts.accuracy["decode"].count == 1
    assert forecasts.accuracy["prefill"].mape == 1.0 and forecasts.accuracy["prefill"].predicted == 4.0


def test_what_the_host_adds_is_learned_where_nothing_waited() -> None:
    forecasts = Forecasts()
    for _ in range(3):
        forecasts.note(3, Role.PREFILL, 12.0, queued=False)
        forecasts.over(request(12.5))
    assert forecasts.delay == 0.5 and forecasts.accuracy["prefill"].errors == pytest.approx(0.2)  # only the first
    forecasts.note(3, Role.PREFILL, 12.0)
    assert forecasts.error(request(12.5)) == 0.0
    forecasts.over(request(19.0))
    assert forecasts.delay == 0.5, "a queue is not the host's"
    forecasts = Forecasts()
    forecasts.note(3, Role.PREFILL, 12.0, queued=False)
    forecasts.over(request(11.0))
    assert forecasts.delay == 0.0, "steps that end early are the step-time model's affair"


@pytest.mark.parametrize(
    ("first", "tier", "at"), [(None, "standard", 11.0), (12.0, BEST_EFFORT, 11.0), (12.0, "standard", inf)]
)
def test_what_tells_nothing_is_not_counted(first: float | None, tier: str, at: float) -> None:
    forecasts = Forecasts()
    forecasts.note(3, Role.DECODE, at)
    assert forecasts.error(request(first, tier)) is None
    forecasts.over(request(first, tier))
    assert not any(one.count for one in forecasts.accuracy.values())


def served(placement: str, admission: str = "none", first_token: str = "prefill") -> Report:
    """A burst of long prompts into steady decoding, on 1P+1D."""
    short = [Arrival(0.02 * n, 20, 30, SLO(0.05, 0.01)) for n in range(40)]
    long = [Arrival(0.2 + 0.001 * n, 400, 4, SLO(0.15, 0.01)) for n in range(6)]
    arrivals = sorted(short + long, key=lambda one: one.time)
    options = Options(placement=placement, admission=admission, tokens=64, rows=16, first_token=first_token)
    return simulate(arrivals, "distserve", Mesh(2), TINY, options=options)


@pytest.mark.parametrize("placement", ["deflect:faster", "deflect:slo", "deflect:dropped", "unified"])
def test_deflected_prompts_are_counted_and_their_first_tokens_predicted(placement: str) -> None:
    report = served(placement)
    deflected = report.forecasts["decode"]
    assert report.deflections >= deflected.count > 0
    assert deflected.mape < 0.6, deflected


@pytest.mark.parametrize("placement", ["least_work", "round_robin", "fewest_requests", "prefill_budget"])
def test_every_placement_has_its_first_tokens_predicted(placement: str) -> None:
    report = served(placement)
    made = report.forecasts["prefill"]
    assert report.deflections == 0 == report.forecasts["decode"].count
    assert made.count > 40 and made.median is not None and made.median < 0.15 and made.mape < 0.25, made


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
def test_the_way_through_a_prefill_instance_is_predicted_too(first_token: str) -> None:
    """With exact step times and first come first served the prediction is nearly right."""
    made = served("deflect:slo", first_token=first_token).forecasts["prefill"]
    assert made.count > 20 and made.mape < 0.25, made


def test_demotions_are_counted() -> None:
    assert served("least_work").counters.demotions == 0
    admitted, refused = served("least_work", "pab"), served("least_work", "pab:refuse")
    assert admitted.counters.demotions > 0 == refused.counters.demotions
    assert set(admitted.summary.reasons) == {"stop"} and refused.summary.reasons["refused"] > 0
