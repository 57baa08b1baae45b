"""Predicted and measured first tokens, and counts of deflected and demoted requests."""

from __future__ import annotations

from math import inf, isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.cluster.first_tokens import Shares, Waits
from jaxserve.sched.cluster.ttft_predictions import TTFTPredictions
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Arrival, Latency, Mesh, Options, Report, simulate

EXACT = Coefficients(1e-3, 1e-4, 1e-5, 0.0, 0.0, 0.0)
TINY = Latency("tiny", kv_bytes_per_token=1000, kv_tokens=4000, page_size=4, coefficients=EXACT, link_bandwidth=1e9)


def request(first: float | None, tier: str = "standard") -> Request:
    made = Request(3, NewRequest(range(5), SamplingParams(max_tokens=4), SLO(), tier=tier), 10.0)
    made.first_token_at = first
    return made


def own(at: float) -> Waits:
    """Return the prediction at time 10.0 of a first token at `at` without waiting."""
    return Waits(own=at - 10.0)


def test_errors_are_relative_to_the_measured_ttft() -> None:
    ttft_predictions = TTFTPredictions()
    assert isnan(ttft_predictions.accuracy["decode"].mape)
    ttft_predictions.note(request(None), Role.PREFILL, 10.0, own(10.5))
    ttft_predictions.note(request(None), Role.DECODE, 10.0, own(11.0))  # rerouted: the last prediction counts
    assert ttft_predictions.error(request(12.0)) == 0.5 and ttft_predictions.error(request(10.5)) == 1.0
    ttft_predictions.over(request(12.0))
    assert ttft_predictions.error(request(12.0)) is ttft_predictions.predicted(request(12.0)) is None
    ttft_predictions.over(request(12.0))  # no prediction was made for this one
    assert ttft_predictions.accuracy["prefill"].median is None
    ttft_predictions.note(request(None), Role.MIXED, 10.0, own(13.0), later=1.0)
    ttft_predictions.over(request(12.0))
    assert ttft_predictions.accuracy["prefill"].median == 1.0
    assert ttft_predictions.accuracy["decode"].mape == 0.5 and ttft_predictions.accuracy["decode"].count == 1
    assert ttft_predictions.accuracy["prefill"].mape == 1.0 and ttft_predictions.accuracy["prefill"].predicted == 4.0


def test_learned_corrections_count_from_the_first_token_on() -> None:
    """They are not delayed until the last token, since an answer may take minutes."""
    ttft_predictions, one = TTFTPredictions(), request(None)
    ttft_predictions.note(one, Role.PREFILL, 10.0, own(11.0))
    ttft_predictions.came(request(12.0))
    ttft_predictions.note(request(None), Role.PREFILL, 10.0, own(11.0))
    again = ttft_predictions.of(request(12.0))
    assert again is not None and 1.1 < again[0] < 2.0
    ttft_predictions.came(request(12.0))
    ttft_predictions.came(request(12.0))  # its second token adds nothing
    twice = TTFTPredictions()
    for _ in range(2):
        twice.note(request(None), Role.PREFILL, 10.0, own(11.0))
        twice.came(request(12.0))
    for each in (ttft_predictions, twice):
        each.note(request(None), Role.PREFILL, 10.0, own(11.0))
    assert ttft_predictions.of(request(12.0)) == twice.of(request(12.0))


@given(
    begun=st.sampled_from([0.0, 0.3, 1.0]),
    ahead=st.sampled_from([0.5, 1.0]),
    late=st.sampled_from([0.0, 1.0]),
    others=st.sampled_from([0.0, 1.0]),
    host=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 20),
)
def test_the_share_of_each_wait_is_learned(
    begun: float, ahead: float, late: float, others: float, host: float, seed: int
) -> None:
    """Learn from policies that preempt, serve by deadline or by arrival, and from a slow host."""
    draw, shares = np.random.default_rng(seed), Shares()

    def came() -> tuple[Waits, float]:
        waits = Waits(*(draw.exponential([0.3, 1.0, 1.0, 1.0, 0.3]) * (draw.random(5) < [0.7, 0.5, 0.3, 0.5, 1.0])))
        counts = begun, ahead, late, others, 1.0
        return waits, sum(share * one for share, one in zip(counts, waits, strict=True)) + host

    for _ in range(300):
        waits, seconds = came()
        shares.learn(waits, seconds * float(draw.lognormal(0.0, 0.05)))
    errors = [abs(shares.seconds(waits) / seconds - 1.0) for waits, seconds in (came() for _ in range(100))]
    assert np.median(errors) < 0.2, errors
    assert shares.seconds(Waits()) == pytest.approx(host, abs=0.15)


def test_a_starved_first_token_does_not_correct_the_others() -> None:
    shares = Shares()
    for turn in range(60):
        shares.learn(Waits(own=1.0), 100.0 if turn % 10 == 9 else 1.0)
    assert shares.seconds(Waits(own=1.0)) < 1.2


@pytest.mark.parametrize(
    ("first", "tier", "at"), [(None, "standard", 11.0), (12.0, BEST_EFFORT, 11.0), (12.0, "standard", inf)]
)
def test_uninformative_predictions_are_not_counted(first: float | None, tier: str, at: float) -> None:
    ttft_predictions = TTFTPredictions()
    ttft_predictions.note(request(None), Role.DECODE, 10.0, own(at))
    assert ttft_predictions.error(request(first, tier)) is None
    assert ttft_predictions.predicted(request(first, tier)) == (None if at == inf else at - 10.0)
    ttft_predictions.over(request(first, tier))
    assert not any(one.count for one in ttft_predictions.accuracy.values())


def test_a_demoted_request_counts_but_teaches_nothing() -> None:
    """Without those that become late, predictions would look best under overload."""
    predictions, demoted = TTFTPredictions(), request(15.0)
    predictions.note(request(None), Role.PREFILL, 10.0, own(11.0))
    demoted.tier = BEST_EFFORT
    assert predictions.error(demoted) == 0.8
    predictions.over(demoted)
    assert predictions.accuracy["prefill"].count == 1
    assert predictions.predict(request(None), Role.PREFILL, own(11.0)) == 1.0


def served(
    routing: str = "least_work", admission: str = "none", first_token: str = "prefill", policy: str = "distserve"
) -> Report:
    """Serve a burst of long prompts beside steady decoding on 1P+1D."""
    short = [Arrival(0.02 * n, 20, 30, SLO(0.05, 0.01)) for n in range(40)]
    long = [Arrival(0.2 + 0.001 * n, 400, 4, SLO(0.15, 0.01)) for n in range(6)]
    arrivals = sorted(short + long, key=lambda one: one.time)
    options = Options(routing=routing, admission=admission, tokens=64, rows=16, first_token=first_token)
    return simulate(arrivals, policy, Mesh(2), TINY, options=options)


@pytest.mark.parametrize("routing", ["deflect:faster", "deflect:slo", "deflect:dropped", "unified"])
def test_deflected_prompts_are_counted_and_predicted(routing: str) -> None:
    report = served(routing)
    deflected = report.ttft_predictions["decode"]
    assert report.deflections >= deflected.count > 0
    assert deflected.mape < 0.6, deflected


@pytest.mark.parametrize(
    ("case", "median", "mape"),
    [
        *(({"routing": name}, 0.15, 0.25) for name in ("least_work", "round_robin", "fewest_requests")),
        ({"routing": "prefill_budget"}, 0.15, 0.25),
        *(({"policy": name}, 0.2, inf) for name in ("edf", "flowprefill", "kairos", "sedf", "sjf", "unified")),
        *(({"routing": "deflect:slo", "first_token": side}, inf, 0.25) for side in ("prefill", "decode")),
    ],
    ids=str,
)
def test_first_tokens_are_predicted(case: dict[str, str], median: float, mape: float) -> None:
    """For every router and prefill order, and nearly exactly with exact step times in order of arrival."""
    report = served(**case)
    made = report.ttft_predictions["prefill"]
    assert made.count > 20 and made.median is not None and made.median < median and made.mape < mape, made
    if not case.get("routing", "").startswith("deflect"):
        assert report.deflections == 0 == report.ttft_predictions["decode"].count and made.count > 30


def test_demotions_are_counted() -> None:
    assert served("least_work").counters.demotions == 0
    admitted, refused = served("least_work", "pab"), served("least_work", "pab:refuse")
    assert admitted.counters.demotions > 0 == refused.counters.demotions
    assert set(admitted.summary.reasons) == {"stop"} and refused.summary.reasons["refused"] > 0
