"""What a simulated scheduler predicts step times with: the truth, a model fitted to it, or either made wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from ..errors import InvalidValue
from ..perf.linear import LinearModel
from ..perf.model import Coefficients, GeneralModel, Load, PerfModel
from ..perf.table import TableModel

Perf = Literal["general", "exact", "table", "linear"]


def perf_model(kind: Perf, truth: Coefficients, seed: int = 0) -> PerfModel:
    """A scheduler's step-time model of devices whose true one is known."""
    general = GeneralModel(truth, correct=kind == "general")
    if kind == "table":
        return TableModel.profiled(general)
    if kind == "linear":
        return LinearModel.fitted((load, truth.step_time(load)) for load in _samples(seed))
    if kind not in ("general", "exact"):
        raise InvalidValue(f"perf={kind!r} must be one of general, exact, table, linear", "perf")
    return general


def _samples(seed: int, count: int = 400) -> Iterator[Load]:
    """Steps to profile: chunks, decode batches and mixtures, as serving meets them."""
    random = np.random.default_rng((seed, 7))
    for step in range(count):
        load = Load()
        if step % 3:
            rows = int(random.integers(1, 128))
            contexts = np.exp(random.normal(np.log(3000), 1.0, rows)).astype(int).clip(64, 131_072).tolist()
            load = Load(decode=rows, longest=max(contexts), context=sum(contexts))
        if step % 3 != 1:
            load = load.add_chunk(int(random.integers(64, 8193)), int(random.integers(0, 32_768)))
        yield load
