"""Laws of workloads: the seed decides, lengths stay inside their bounds, and the moments are those asked for."""

from itertools import pairwise

import numpy as np
import pytest

from jaxserve.sched.errors import InvalidValue
from jaxserve.sched.sim.scenarios import K128_WAVES, NAMED
from jaxserve.sched.sim.workload import (
    K32,
    K100,
    K128,
    Arrival,
    Arrivals,
    BlockTokens,
    Lengths,
    scale,
)

RANDOM = np.random.default_rng


@pytest.mark.parametrize("workload", NAMED.values(), ids=list(NAMED))
def test_the_seed_decides_and_the_rate_only_stretches_time(workload) -> None:  # type: ignore[no-untyped-def]
    first, again, other, faster = (workload.draw(300, rate, seed) for rate, seed in ((2, 1), (2, 1), (2, 2), (4, 1)))
    assert first == again != other
    assert [a.prompt_tokens for a in first] == [a.prompt_tokens for a in faster]
    if workload.name != K128_WAVES.name:  # its waves last as long at any rate
        assert [a.time for a in first] == pytest.approx([2 * a.time for a in faster])
    assert all(a.time <= b.time for a, b in pairwise(first))


@pytest.mark.parametrize(
    ("workload", "share", "low", "high"),
    [(K128, 0.02, 65536, 131072), (K100, 0.03, 32768, 102400), (K32, 0.03, 16384, 32768)],
    ids=["K128", "K100", "K32"],
)
def test_long_tail_is_as_published(workload, share, low, high) -> None:  # type: ignore[no-untyped-def]
    arrivals = workload.draw(40_000, 3.0, 0)
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
    ],
)
def test_lengths(lengths: Lengths, mean: float) -> None:
    drawn = lengths.draw(RANDOM(0), 50_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.min() >= lengths.low and drawn.max() <= lengths.high and np.all(drawn == np.rint(drawn))


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [(Arrivals(), 1.0), (Arrivals("gamma", cv=3.0), 3.0), (Arrivals("gamma", cv=0.2), 0.2), (Arrivals("even"), 0.0)],
)
def test_gaps_have_the_variation_asked_for(arrivals: Arrivals, cv: float) -> None:
    times = arrivals.draw(RANDOM(0), 40_000, 5.0)
    gaps = np.diff(times)
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_on_off_keeps_the_mean_rate_and_its_contrast() -> None:
    times = Arrivals("on_off", on=10, off=30, contrast=5).draw(RANDOM(0), 80_000, 4.0)
    inside = np.mod(times, 40) < 10
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.02)
    assert inside.mean() / 10 / ((1 - inside.mean()) / 30) == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lengths("lognormal", median=3), "median and sigma"),
        (lambda: Lengths("fixed", value=-1), "positive"),
        (lambda: Lengths("uniform", low=9, high=3), "low=9 and high=3"),
        (lambda: Arrivals(cv=0), "cv=0"),
        (lambda: K128.draw(5, -1.0, 0), "rate=-1.0"),
        (lambda: K128.draw(0, 1.0, 0), "num_requests=0"),
        (lambda: scale([], prompt=0), "prompt_scale=0"),
    ],
)
def test_nonsense_is_refused_by_name(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidValue, match=message):
        make()


def test_prompts_of_two_requests_share_nothing() -> None:
    arrival = Arrival(0.0, 1000, 1)
    assert not set(arrival.prompt(1)) & set(arrival.prompt(2))
    assert len(arrival.prompt(3)) == 1000


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


def test_scale_divides_lengths_and_stretches_time() -> None:
    [scaled] = scale([Arrival(10.0, 1000, 7, hash_ids=(1, 2))], time=0.5, prompt=4, output=100)
    assert (scaled.time, scaled.prompt_tokens, scaled.output_tokens, scaled.block) == (5.0, 250, 1, 128.0)
