"""The work list of expert products: every pair once, in tiles of one expert, for any choice of experts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ops.grouped_matmul import plan
from tests.support.examples import examples


@settings(max_examples=examples(25), deadline=None)
@given(
    chosen=st.lists(st.integers(-1, 5), min_size=1, max_size=40),
    experts=st.sampled_from([1, 5]),
    shape=st.sampled_from([(1, 1), (4, 1), (8, 8), (16, 8)]),
    pairwise=st.booleans(),
)
def test_every_pair_is_computed_once(chosen: list[int], experts: int, shape: tuple[int, int], pairwise: bool) -> None:
    tile, align = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PAIRWISE", len(chosen) if pairwise else 0)
        made = plan.plan_experts(np.array(chosen, np.int32), experts=experts, tile=tile, align=align)
    got = plan.Groups(*(np.asarray(part) for part in made))
    rows = len(got.source)
    covered = np.zeros(rows, np.int32)
    used = int(got.used[0])
    for expert, begin, count in zip(got.expert[:used], got.begin[:used], got.length[:used], strict=True):
        assert 1 <= count <= tile and begin % align == 0 and begin + tile <= rows
        covered[begin : begin + count] += 1
        assert (got.owner[begin : begin + count] == expert).all()
    assert (np.diff(got.begin[:used]) > 0).all()
    for pair, (expert, place) in enumerate(zip(chosen, got.place, strict=True)):
        if 0 <= expert < experts:
            assert got.source[place] == pair and got.owner[place] == expert and covered[place] == 1
        else:
            assert place == rows
    real = [e for e in chosen if 0 <= e < experts]
    assert covered.sum() == len(real) and covered.max(initial=0) <= 1
    assert (got.sizes == np.bincount(real, minlength=experts)).all() and (got.starts % align == 0).all()
    # In step order: a row's result does not depend on it, but it makes repeated steps identical.
    for e in range(experts):
        places = [int(p) for p, c in zip(got.place, chosen, strict=True) if c == e]
        assert places == sorted(places)


def test_a_tile_that_groups_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="tile=12 must be a positive multiple of align=8"):
        plan.plan_experts(np.zeros(3, np.int32), experts=2, tile=12, align=8)
