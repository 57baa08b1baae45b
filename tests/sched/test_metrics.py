"""Metrics: general laws and hand-computed values."""

import json
from dataclasses import dataclass, field
from math import inf, isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.metrics import goodput_rate, length_class, measure, spread, summarize


@dataclass
class Done:
    token_times: list[float]
    arrival: float = 0.0
    prompt_length: int = 100
    slo: SLO = field(default_factory=lambda: SLO(ttft=2.0, tpot=0.1))
    finish_reason: str | None = "stop"
    id: int = 0


@given(gaps=st.lists(st.floats(0, 10), min_size=1, max_size=40), first=st.floats(0, 10))
def test_means_are_below_maxima(gaps: list[float], first: float) -> None:
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    one = measure(Done(times))
    tolerance = 1e-9 + 1e-12 * times[-1]
    assert one.tpot <= one.worst_tpot + tolerance <= one.largest_gap + 2 * tolerance
    assert one.tpot <= one.largest_gap + tolerance and one.window_tpot <= one.largest_gap + tolerance
    assert one.attained == (first <= 2 + 1e-9 and times[-1] - first <= 0.1 * len(gaps) + 1e-9)


def test_hand_computed_metrics() -> None:
    one = measure(Done([1.5, 1.6, 1.9, 2.0], arrival=1.0))
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.5 / 3)
    assert one.worst_tpot == pytest.approx(0.2)
    assert one.largest_gap == pytest.approx(0.3)
    assert one.window_tpot == one.tpot  # with ten tokens or fewer, a single window
    assert (one.ttft_attained, one.tpot_attained, one.attained) == (True, False, False)


def test_window_of_ten() -> None:
    times = [0.0] + [1.0 + 0.01 * i for i in range(30)]
    assert measure(Done(times)).window_tpot == pytest.approx(1.09 / 10)


def test_the_papers_objectives_are_three() -> None:
    """Stall after the first token, in the middle, or never: the mean hides both, a window only the short one."""
    early = measure(Done([0.0] + [0.3 + 0.01 * i for i in range(20)]))
    middle = measure(Done([0.1 * i for i in range(10)] + [2.5 + 0.01 * i for i in range(30)]))
    even = measure(Done([0.1 * i for i in range(40)]))
    attained = [(one.tpot_attained, one.worst_attained, one.window_attained) for one in (early, middle, even)]
    assert attained == [(True, False, True), (True, False, False), (True, True, True)]
    summary = summarize([early, middle, even])
    assert (summary.attained, summary.worst_attained, summary.window_attained) == pytest.approx((1, 1 / 3, 2 / 3))


TIGHT, GAPS = SLO(2.0, 0.1), SLO(2.0, 0.1, tbt=0.15)


@pytest.mark.parametrize(
    ("done", "mean", "gap", "attained"),
    [
        (Done([1.0]), True, True, True),
        (Done([1.0], slo=GAPS), True, True, True),
        (Done([], finish_reason=None), False, True, False),
        (Done([], finish_reason="refused"), False, True, False),
        (Done([1.0], finish_reason=None), False, True, False),
        (Done([1.0], finish_reason="rejected"), False, True, False),
        (Done([1.0, 1.1], slo=GAPS, finish_reason="error"), False, False, False),
        (Done([2.0 + 1e-12]), True, True, True),
        (Done([2.1]), True, True, False),
        (Done([1.0, 1.0, 1.2], slo=TIGHT), True, True, True),
        (Done([1.0, 1.0, 1.2], slo=GAPS), True, False, False),
        (Done([1.0, 1.1, 1.2], slo=GAPS), True, True, True),
        (Done([1.0, 1.1, 1.2], slo=SLO(2.0, 0.05, tbt=0.15)), False, True, False),
    ],
    ids=str,
)
def test_a_request_attains_its_mean_and_its_largest_gap(done: Done, mean: bool, gap: bool, attained: bool) -> None:
    """A single token is never late after the first, and no token attains nothing."""
    one = measure(done)
    assert (one.mean_attained, one.tbt_attained, one.attained) == (mean, gap, attained)
    assert one.tpot_attained == (mean and gap)
    if len(done.token_times) < 2:
        assert one.worst_attained is one.window_attained is (mean and gap)


def test_stages_have_their_own_allowance() -> None:
    assert measure(Done([1.0, 1.5, 2.0]), allowance=1.0).tpot_attained
    assert not measure(Done([1.0, 1.5, 2.0]), allowance=0.9).tpot_attained


def test_summary() -> None:
    requests = [
        Done([1.0, 1.1], prompt_length=1000, id=0),
        Done([5.0, 5.1], prompt_length=9000, id=1, arrival=1.0),
        Done([], prompt_length=70_000, id=2, finish_reason="rejected", arrival=2.0),
        Done([3.5, 3.7], prompt_length=3000, id=3, arrival=3.0, slo=SLO(2.0, 0.2)),
    ]
    summary = summarize([measure(one, "chat" if one.id else "code") for one in requests])
    assert (summary.count, summary.attained, summary.ttft_attained, summary.tpot_attained) == (4, 0.5, 0.5, 0.75)
    assert summary.token_weighted == pytest.approx(4000 / 83_000)
    assert summary.by_length["<4K"] == (2, 1.0) and summary.by_length[">=64K"] == (1, 0.0)
    assert isnan(summary.by_length["16-64K"].attained)
    assert summary.by_class == {"chat": (3, pytest.approx(1 / 3)), "code": (1, 1.0)}
    assert summary.duration == pytest.approx(5.1)
    assert summary.request_goodput == pytest.approx(2 / 5.1)
    assert summary.output_throughput == pytest.approx(6 / 5.1)
    assert summary.median_speed == pytest.approx(10.0)
    assert summary.reasons == {"rejected": 1, "stop": 3}
    assert json.loads(json.dumps(summary.as_dict(), allow_nan=False))["by_length"]["16-64K"]["attained"] is None
    assert summarize([measure(one) for one in requests], skip=1).count == 2


def test_an_empty_run_is_not_an_error() -> None:
    summary = summarize([])
    assert summary.count == 0 and isnan(summary.attained) and isnan(summary.median_speed)


@pytest.mark.parametrize(
    ("prompt", "name"), [(1, "<4K"), (4095, "<4K"), (4096, "4-16K"), (65535, "16-64K"), (65536, ">=64K")]
)
def test_length_classes(prompt: int, name: str) -> None:
    assert length_class(prompt) == name


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), max_size=8, unique_by=lambda pair: pair[0]))
def test_goodput_rate_passes_at_all_lower_rates(pairs: list[tuple[int, float]]) -> None:
    rates, shares = [rate for rate, _ in pairs], [share for _, share in pairs]
    found = goodput_rate(rates, shares, 0.9)
    passed = {rate: share >= 0.9 for rate, share in pairs}
    above = [rate for rate in rates if found is None or rate > found]
    assert all(passed[rate] for rate in rates if rate not in above)
    assert not above or not passed[min(above)]


def test_percentiles_ignore_infinite_values() -> None:
    assert spread([1.0, inf, 3.0]).p50 == 2.0


def test_requests_without_objectives_count_in_no_attainment() -> None:
    late, best = Done([9.0, 9.1], id=0), Done([50.0, 60.0], slo=NO_SLO, id=1)
    summary = summarize([measure(late, "paid"), measure(best, "free")])
    assert (summary.count, summary.attained, summary.token_weighted) == (2, 0.0, 0.0)
    assert summary.by_class == {"free": (1, 1.0), "paid": (1, 0.0)}
    assert summarize([measure(best)]).attained == 1.0
