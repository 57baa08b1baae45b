"""A model whose predictions are all wrong by one factor, and what it would say without that."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Array, Load, PerfModel


@dataclass(frozen=True, slots=True)
class Scaled:
    """Another model's seconds times `factor`. To look at only: the other one learns."""

    perf: PerfModel
    factor: float

    @property
    def version(self) -> int:
        return hash((self.perf.version, self.factor))

    @property
    def prefill_rate(self) -> float:
        return self.perf.prefill_rate  # observed, not predicted

    def step_time(self, load: Load) -> float:
        return self.perf.step_time(load) * self.factor

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self.perf.decode_times(rows, longest, context) * self.factor

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        return self.perf.prefill_times(tokens, context, chunk) * self.factor

    def observe(self, load: Load, seconds: float) -> None:
        raise AssertionError("the model behind it learns")
