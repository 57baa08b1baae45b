"""Predictions that are wrong for good: what a policy is worth when its step-time model is off."""

from __future__ import annotations

from ..perf import make
from ..perf.model import Array, Coefficients, Load, PerfModel


class Wrong:
    """A PerfModel whose every prediction is `factor` times what it should be, whatever is measured."""

    def __init__(self, model: PerfModel, factor: float) -> None:
        self._model = model
        self._factor = factor

    @property
    def version(self) -> int:
        return self._model.version

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


def perf_model(kind: str, truth: Coefficients, seed: int = 0, error: float = 0.0) -> PerfModel:
    """The model `kind` (see perf.make) of devices whose true one is known; off by `error`, a share, for good."""
    model = make(kind, truth, seed=seed)
    return Wrong(model, 1.0 + error) if error else model
