"""Statistics shared by the tests of sampling."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxserve.engine.programs.inputs import Limits, SlotTable
from jaxserve.engine.programs.sampling import Column, SamplingRows
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin

V, DRAWS = 24, 4096
LIMITS = Limits(slots=4, tokens=16, pages=8, page_size=4, row_pages=4, vocab=V)


def table(params: SamplingParams, draws: int, *, seed: int = 1) -> SamplingRows:
    """Return `draws` rows of one request at successive positions."""
    slots = SlotTable(LIMITS)
    slots.begin(2, Begin(params, seed, (), (), 3, (1,)))
    columns = np.repeat(slots.columns[2][None], draws, axis=0)
    columns[:, Column.POSITION] = np.arange(draws)
    return SamplingRows(jnp.asarray(columns))


Array = npt.NDArray[Any]


def chi_square(counts: Array, chances: Array) -> float:
    """Return the p-value of counts, with tokens expected less than five times pooled."""
    from scipy.stats import chi2

    want = chances * counts.sum()
    assert not counts[chances < 1e-20].any(), "an excluded token was sampled"
    rare = want < 5
    seen, hoped = counts[~rare].tolist(), want[~rare].tolist()
    if want[rare].sum() > 1:
        seen, hoped = [*seen, counts[rare].sum()], [*hoped, want[rare].sum()]
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, hoped, strict=True))
    return float(chi2.sf(statistic, max(1, len(seen) - 1)))
