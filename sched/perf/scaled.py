"""A model that multiplies the predictions of another: to add an error on purpose, or to correct one."""

from __future__ import annotations

from dataclasses import dataclass

from ..api.perf import Array, Load, PerfModel


@dataclass(frozen=True, slots=True)
class Scaled:
    """Predictions of `model` times a constant `factor`."""

    model: PerfModel
    factor: float

    @property
    def version(self) -> int:
        return self.model.version

    @property
    def prefill_rate(self) -> float:
        return self.model.prefill_rate / self.factor

    def step_time(self, load: Load) -> float:
        return self.factor * self.model.step_time(load)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self.factor * self.model.decode_times(rows, longest, context)

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        return self.factor * self.model.prefill_times(tokens, context, chunk)

    def observe(self, load: Load, seconds: float) -> None:
        self.model.observe(load, seconds)
