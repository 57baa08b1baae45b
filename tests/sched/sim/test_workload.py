"""Laws of workloads: the seed decides, lengths stay within their bounds, and moments match the parameters."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Latency, simulate
from jaxserve.sched.sim.scenarios import CODER, K128_WAVES, NAMED, REASONING, TOOLLLM
from jaxserve.sched.sim.workload import (
    K32,
    K100,
    K128,
    POISSON,
    Arrival,
    Arrivals,
    BlockTokens,
    Lengths,
    Mix,
    Rounds,
    Share,
    Slowdown,
    best_effort,
    for_server,
    scale,
    scale_slo,
    validate,
)
from tests.support.examples import examples

RANDOM = np.random.default_rng


@pytest.mark.parametrize("workload", NAMED.values(), ids=list(NAMED))
def test_the_seed_decides_and_the_rate_only_rescales_time(workload) -> None:  # type: ignore[no-untyped-def]
    first, again, other, faster = (workload.draw(300, rate, seed) for rate, seed in ((2, 1), (2, 1), (2, 2), (4, 1)))
    assert first == again != other
    assert [a.prompt_tokens for a in first] == [a.prompt_tokens for a in faster]
    if workload.name != K128_WAVES.name:  # its waves last equally long at any rate
        assert [a.time for a in first] == pytest.approx([2 * a.time for a in faster])
    assert all(a.time <= b.time for a, b in pairwise(first))


@pytest.mark.parametrize(
    ("workload", "share", "low", "high"),
    [(K128, 0.02, 65536, 131072), (K100, 0.03, 32768, 102400), (K32, 0.03, 16384, 32768)],
    ids=["K128", "K100", "K32"],
)
def test_long_tail_is_as_published(workload, share, low, high) -> None:  # type: ignore[no-untyped-def]
    arrivals = workload.draw(20_000, 3.0, 0)
    prompts = np.array([a.prompt_tokens for a in arrivals])
    outputs = np.array([a.output_tokens for a in arrivals])
    body = Lengths("lognormal", median=2500, sigma=1.0, low=64, high=32768).draw(RANDOM(9), 40_000)
    natural = float(np.mean((body >= low) & (body <= high)))  # of the body itself, in the tail's range
    assert np.mean((prompts >= low) & (prompts <= high)) == pytest.approx(share + (1 - share) * natural, abs=0.004)
    assert prompts.min() >= 64 and prompts.max() <= high
    assert np.median(prompts) == pytest.approx(2500, rel=0.05)
    assert outputs.mean() == pytest.approx(400, rel=0.02) and outputs.std() == pytest.approx(360, rel=0.06)
    assert outputs.min() >= 8 and outputs.max() <= 4096
    assert len(arrivals) / arrivals[-1].time == pytest.approx(3.0, rel=0.03)


@pytest.mark.parametrize(
    ("lengths", "mean"),
    [
        (Lengths("fixed", value=100), 100.0),
        (Lengths("uniform", low=1, high=9), 5.0),
        (Lengths("loguniform", low=1, high=100), 99 / np.log(100)),
        (Lengths("lognormal", mean=300, std=100), 300.0),
        (Lengths("gamma", mean=300, std=200), 300.0),
        (Lengths("beta", mean=300, std=100, low=20, high=500), 300.0),
    ],
)
def test_lengths_stay_within_bounds_with_the_given_moments(lengths: Lengths, mean: float) -> None:
    drawn = lengths.draw(RANDOM(0), 50_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.min() >= lengths.low and drawn.max() <= lengths.high and np.all(drawn == np.rint(drawn))
    if lengths.std is not None:
        assert drawn.std() == pytest.approx(lengths.std, rel=0.03)


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [(Arrivals(), 1.0), (Arrivals("gamma", cv=3.0), 3.0), (Arrivals("gamma", cv=0.2), 0.2), (Arrivals("even"), 0.0)],
)
def test_gaps_have_the_requested_variation(arrivals: Arrivals, cv: float) -> None:
    times = arrivals.draw(RANDOM(0), 40_000, 5.0)
    gaps = np.diff(times)
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_bursts_hold_their_share_size_and_the_exact_rate() -> None:
    times = Arrivals("bursts", size=50, duty=0.01, share=0.6).draw(RANDOM(0), 30_000, 2.0)
    assert (len(times) - 1) / times[-1] == pytest.approx(2.0)
    crowded = np.histogram(times, np.arange(0, times[-1], 1.0))[0]  # a burst of 50 takes 0.4 s of every 42 s
    assert crowded[crowded >= 8].sum() / len(times) == pytest.approx(0.6, abs=0.06)
    assert (crowded >= 8).mean() == pytest.approx(1 / 41.7, rel=0.2)


PARTS = st.lists(
    st.tuples(st.floats(0.1, 10), st.sampled_from([K32, CODER, TOOLLLM, REASONING])), min_size=1, max_size=4
)


@settings(max_examples=examples(40), deadline=None)
@given(parts=PARTS, common=st.booleans(), count=st.integers(1, 200), rate=st.floats(0.1, 50), seed=st.integers(0, 99))
def test_mixtures_have_the_sum_of_their_parts(parts, common, count, rate, seed) -> None:  # type: ignore[no-untyped-def]
    mix = Mix("any", tuple(Share(share, workload) for share, workload in parts), POISSON if common else None)
    arrivals = mix.draw(count, rate, seed)
    validate(arrivals)
    assert arrivals == mix.draw(count, rate, seed)
    assert sum(a.after is None for a in arrivals) == count
    own = {workload.request_class for _, workload in parts}
    assert {a.class_ for a in arrivals} <= own
    assert all(a.class_ == arrivals[a.after].class_ for a in arrivals if a.after is not None)


def test_mixtures_keep_shares_and_the_arrival_process_of_each_part() -> None:
    even = replace(K32, name="even", request_class="even", arrivals=Arrivals("even"))
    mix = Mix("two", (Share(1, even), Share(3, K128)))
    arrivals = mix.draw(20_000, 8.0, 0)
    ticks = [a.time for a in arrivals if a.class_ == "even"]
    assert np.diff(ticks) == pytest.approx(0.5)
    assert len(ticks) / len(arrivals) == pytest.approx(0.25, abs=0.005)
    assert len(arrivals) / arrivals[-1].time == pytest.approx(8.0, rel=0.02)


def test_a_share_becomes_best_effort_and_rounds_stay_together() -> None:
    arrivals = TOOLLLM.draw(2000, 2.0, 0)
    lowered = best_effort(arrivals, 0.3, seed=1)
    assert lowered == best_effort(arrivals, 0.3, seed=1) != best_effort(arrivals, 0.3, seed=2)
    firsts = [a.tier == BEST_EFFORT for a in lowered if a.after is None]
    assert np.mean(firsts) == pytest.approx(0.3, abs=0.04)
    assert all(a.tier == lowered[a.after].tier for a in lowered if a.after is not None)
    assert all((a.slo.ttft == inf) == (a.tier == BEST_EFFORT) for a in lowered)
    assert best_effort(arrivals, 0.0) == arrivals


def test_scaling_slos_changes_nothing_else() -> None:
    [arrival] = REASONING.draw(1, 1.0, 0)
    [scaled] = scale_slo([replace(arrival, slo=replace(arrival.slo, tbt=0.4))], ttft=2, tpot=0.5)
    assert scaled.slo == SLO(2 * arrival.slo.ttft, 0.05, 0.2, (("thinking", 0.025),))
    assert replace(scaled, slo=arrival.slo) == arrival


def test_a_slowdown_is_relative_to_another_server() -> None:
    slower = Slowdown(3, 0.025, 90e-6).measured(lambda tokens: 0.5 + 0.001 * tokens)
    assert slower.ttft(1000) == pytest.approx(3 * 1.5)
    square = slower.measured(lambda tokens: 1e-7 * tokens**2)
    assert 0 < square.ttft(1) < 1e-2 and square.ttft(2048) == pytest.approx(3 * 1e-7 * 2048**2)
    mix = for_server(Mix("m", (Share(1, REASONING), Share(1, K32))), lambda tokens: 0.5 + 0.001 * tokens)
    for arrival in mix.draw(50, 1.0, 0):
        wanted = 3 * (0.5 + 0.001 * arrival.prompt_tokens) if arrival.class_ == "reasoning" else K32.ttft
        assert arrival.slo.ttft == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time": -1.0}, "arrival 1: time=-1.0 must be 0 or more"),
        ({"time": float("nan")}, "arrival 1: time=nan"),
        ({"time": 0.5}, "arrival 1: time=0.5 is before 1.0: arrivals must be in order"),
        ({"prompt_tokens": 0}, "arrival 1: prompt_tokens=0 must be at least 1"),
        ({"output_tokens": 0}, "arrival 1: output_tokens=0"),
        ({"thinking_tokens": 9}, "arrival 1: thinking_tokens=9 must be 0 to output_tokens=4"),
        ({"after": 1}, "arrival 1: after=1 must be an earlier place"),
        ({"delay": -0.1}, "arrival 1: delay=-0.1"),
    ],
)
def test_unordered_requests_are_refused_by_position(change: dict[str, float], message: str) -> None:
    good = Arrival(1.0, 5, 4)
    validate([good, replace(good, after=0, delay=2.0, thinking_tokens=4)])
    with pytest.raises(InvalidValue, match=message):
        validate([good, replace(good, **change)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lengths("beta", mean=600, std=9, high=500), "'beta' with mean=600 and std=9 do not fit between"),
        (lambda: Lengths("beta", mean=300, std=250, high=500), "do not fit between 1 and 500"),
        (lambda: Lengths("gamma", median=3, sigma=1), "mean and std"),
        (lambda: Arrivals("bursts", size=0.5), "size=0.5"),
        (lambda: Arrivals("bursts", share=0), "share=0"),
        (lambda: Arrivals("bursts", duty=-1), "duty=-1"),
        (lambda: Mix("empty", ()), "at least one part"),
        (lambda: Share(0, K32), "share=0 of K32"),
        (lambda: Mix("m", (Share(1, K32),)).draw(0, 1.0, 0), "num_requests=0"),
        (lambda: Mix("m", (Share(1, K32),)).draw(1, 0.0, 0), "rate=0.0"),
        (lambda: replace(K32, ttft=0.0), "ttft=0.0 must be a positive"),
        (lambda: replace(K32, tpot=0.0), "tpot=0.0 must be a positive"),
        (lambda: replace(REASONING, thinking_tpot=0.0), "thinking"),
        (lambda: replace(K32, tier="gold"), "tier='gold'"),
        (lambda: Slowdown(0, 1, 1), "slowdown times=0"),
        (lambda: Rounds(0.5, 1, 1), "rounds mean=0.5"),
        (lambda: best_effort([], 1.5), "share=1.5"),
        (lambda: scale_slo([], ttft=0), "ttft=0"),
        (lambda: Lengths("lognormal", median=3), "median and sigma"),
        (lambda: Lengths("fixed", value=-1), "positive"),
        (lambda: Lengths("uniform", low=9, high=3), "low=9 and high=3"),
        (lambda: Arrivals(cv=0), "cv=0"),
        (lambda: K128.draw(5, -1.0, 0), "rate=-1.0"),
        (lambda: K128.draw(0, 1.0, 0), "num_requests=0"),
        (lambda: scale([], prompt=0), "prompt_scale=0"),
    ],
)
def test_invalid_arguments_are_named(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidValue, match=message):
        make()


def test_unnamed_requests_never_share_named_blocks() -> None:
    """If a trace names only blocks of some requests, no other request gets a prefix hit by accident."""
    for id, name in ((7, 7), (0, 0), (3, 4)):
        named = Arrival(0.0, 1000, 1, hash_ids=(name,)).prompt(12)
        assert not set(Arrival(0.0, 1000, 1).prompt(id)) & set(named)
        assert not set(Arrival(0.0, 1000, 1).prompt(11)) & set(named)
    mixed = [Arrival(0.0, 1000, 2), Arrival(9.0, 1000, 2, hash_ids=(0, 1)), Arrival(18.0, 1000, 2, hash_ids=(0,))]
    device = Latency(
        "test", kv_bytes_per_token=1000, kv_tokens=100_000, coefficients=Coefficients(1e-3, 1e-4, 1e-5, 0, 0, 0)
    )
    assert simulate(mixed, "distserve", "1x1", device).counters.prefix_hits == 512


@pytest.mark.parametrize("block", [512, 512 / 3, 64.0, 1500])
def test_equal_blocks_are_equal_tokens_and_slices_agree_with_items(block: float) -> None:
    names = (7, 3, 9)
    tokens = BlockTokens(1400, names, block, 1)
    whole = [tokens[i] for i in range(1400)]
    assert tuple(whole) == tokens[:] == tuple(tokens)
    assert tokens[100:777] == tuple(whole[100:777]) and tokens[-1] == whole[-1] and tokens[::7] == tuple(whole[::7])
    assert len(set(whole)) == 1400
    other = BlockTokens(1400, (7, 3, 8), block, 2)
    shared = min(1400, int(np.ceil(2 * block)))
    assert other[:shared] == tokens[:shared]
    assert not set(other[shared:]) & set(tokens[shared:])
    with pytest.raises(IndexError):
        tokens[1400]


def test_scale_divides_lengths_and_rescales_time() -> None:
    [scaled] = scale([Arrival(10.0, 1000, 7, hash_ids=(1, 2))], time=0.5, prompt=4, output=100)
    assert (scaled.time, scaled.prompt_tokens, scaled.output_tokens, scaled.block) == (5.0, 250, 1, 128.0)


@given(thinking=st.integers(0, 50), answer=st.integers(1, 50), output=st.floats(0.1, 200))
def test_scaled_thinking_stays_inside_the_output(thinking: int, answer: int, output: float) -> None:
    validate(scale([Arrival(0.0, 9, thinking + answer, thinking_tokens=thinking)], output=output))
