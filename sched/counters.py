"""Totals of one scheduler since it began, for metrics and reports. Writer: the Scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from .grant import Granted
from .perf.model import Load


@dataclass(slots=True)
class Counters:
    """Tokens, steps and seconds, all monotone."""

    steps: int = 0
    prompt_tokens: int = 0  # prompt tokens computed
    generated_tokens: int = 0
    surplus_tokens: int = 0  # computed for rows that turned out finished
    preemptions: int = 0  # KV dropped under page pressure
    rebuilds: int = 0  # steps that raised, after which the pool was new
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of these, found
    predicted_seconds: float = 0.0  # of the steps that came back
    measured_seconds: float = 0.0

    def count(self, granted: Granted) -> None:
        self.preemptions += len(granted.dropped)
        for request in granted.admitted:
            if not request.drops and not request.output:
                self.prefix_queries += request.prompt_length
                self.prefix_hits += request.cached

    def step(self, load: Load, predicted: float, measured: float) -> None:
        self.steps += 1
        self.prompt_tokens += load.prefill
        self.predicted_seconds += predicted
        self.measured_seconds += measured

    @classmethod
    def total(cls, several: Iterable[Counters]) -> Counters:
        """Sum over instances."""
        result = cls()
        for one in several:
            for field in fields(cls):
                setattr(result, field.name, getattr(result, field.name) + getattr(one, field.name))
        return result
