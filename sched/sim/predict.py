"""What a simulated scheduler predicts step times with: the truth, a model fitted to it, or either made wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from ..errors import InvalidValue
from ..perf.linear import LinearModel
from ..perf.model import Array, Coefficients, GeneralModel, Load, PerfModel
from ..perf.table import TableModel

Perf = Literal["general", "exact", "table", "linear"]


class Wrong:
    """A PerfModel whose every prediction is `factor` times what it should be, whatever is measured."""

    def __init__(self, model: PerfModel, factor: float) -> None:
        self._model = model
        self._factor = factor

    @property
    def prefill_rate(self) -> float:
        return self._model.prefill_rate / self._factor

    def step_time(self, load: Load) -> float:
        return self._factor * self._model.step_time(load)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self._factor * self._model.decode_times(rows, longest, context)

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        return self._factor * self._model.prefill_times(tokens, context, chunk)

    def observe(self, load: Load, seconds: float) -> None:
        self._model.observe(load, seconds)


def perf_model(kind: Perf, truth: Coefficients, seed: int = 0, error: float = 0.0) -> PerfModel:
    """A scheduler's step-time model of devices whose true one is known; off by `error` (a share) for good."""
    model = _model(kind, truth, seed)
    return Wrong(model, 1.0 + error) if error else model


def _model(kind: Perf, truth: Coefficients, seed: int) -> PerfModel:
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
