"""Values of requests in the dynamic program: priorities, sets of the highest value, and lots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.feasibility import Mask
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.slos_serve import dp
from jaxserve.sched.policies.slos_serve.commitments import Commitments, Prompts
from jaxserve.sched.policies.slos_serve.dp import admitted, largest_set, tier_of, tiers, values
from jaxserve.sched.policies.slos_serve.speculation import PrefillSupply, StepCosts
from tests.support.examples import examples

TOKEN = Coefficients(fixed=0, prefill=1 / 6, decode=1 / 6, quadratic=0, longest=0, context=0)  # six tokens per second
TERMS = StepCosts(GeneralModel(TOKEN, correct=False), 8192, 1.0, margin=0.0)


def prompts(deadline: list[float], tokens: list[float], tpot: float = 1.0) -> Prompts:
    count = len(deadline)
    return Prompts(np.array(deadline), np.array(tokens), np.full(count, tpot), np.zeros(count))


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 40), st.sampled_from([0.5, 1.0, 2.0]), st.integers(-1, 1)),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 3),
    st.sampled_from([1e9, 3.0]),
    st.integers(-5, 5),
)
@settings(max_examples=examples(300), deadline=None)
def test_fast_paths_and_lots_find_a_set_of_the_highest_value(
    jobs: list[tuple[int, int, float, int]], running: int, free: float, level: int
) -> None:
    """The fast paths and lots of `admitted` match the full program's value, and a common priority changes nothing."""
    deadline, tokens, tpot, priority = (list(column) for column in zip(*jobs, strict=True))
    count = len(jobs)
    new = Prompts(np.array(deadline, float), np.array(tokens, float), np.array(tpot), np.ones(count))
    standing = Commitments(0.0, np.full(running, 0.5), np.ones(running), prompts([], []), free)
    found, value = admitted(standing, new, TERMS, values(priority)), values(priority)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillSupply, "uniform", lambda self, counts: False)
        whole = admitted(standing, new, TERMS, value)
        assert float(value[found].sum()) == float(value[whole].sum())
    among = tiers(np.concatenate((standing.tpot, new.tpot)))
    tier = tier_of(new.tpot, among)
    counts = np.bincount(tier_of(standing.tpot, among), minlength=len(among)).astype(float)
    supply = PrefillSupply(TERMS, among.tolist(), standing.load, running, float(new.tokens.mean()))
    none: Mask = np.zeros(count, dtype=bool)
    plain = largest_set(0.0, new, tier, none, counts, supply.rate, free, value)
    assert float(value[found].sum()) == float(value[plain].sum())
    alike = admitted(standing, new, TERMS, values([level] * count))
    assert alike.tolist() == admitted(standing, new, TERMS).tolist()


def test_a_value_is_that_of_a_priority() -> None:
    """A request is worth two of the next lower priority, and sums of values are exact."""
    assert values([0, 1, -1, 3]).tolist() == [1.0, 0.5, 2.0, 0.125]
    assert values([10_000, -10_000]).tolist() == [2.0**-dp.SPAN, 2.0**dp.SPAN]
    assert values([dp.SPAN, -dp.SPAN]).sum() - 2.0**dp.SPAN == 2.0**-dp.SPAN


def test_lots_are_smaller_with_more_kinds() -> None:
    """Of fourteen priorities at once ten fit, and the higher values are admitted."""
    standing = Commitments(0.0, np.zeros(0), np.zeros(0), prompts([], []), 1e9)
    new = prompts([100.0] * 14, [60.0] * 14, tpot=1e6)
    order = np.random.default_rng(0).permutation(14)
    found = admitted(standing, new, TERMS, values(order.tolist()))
    assert sorted(order[found].tolist()) == list(range(10))
