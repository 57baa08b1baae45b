"""Corrections while serving: small, bounded, and the same for every form of step-time model."""

from __future__ import annotations

WEIGHT = 0.05  # of one step: half of a drift is learnt in 14 steps
STEP = 2.0  # a step counts at most as this many times faster or slower than expected: a pause is no trend
BOUND = 10.0  # most that a model is ever corrected by


class Ratio:
    """A moving average of measured/predicted: 1 where the model is right. No step moves it by more than 5 %, and it
    stays within [1/BOUND, BOUND]. Writer: the model that holds it."""

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, predicted: float, seconds: float) -> None:
        """One more step, `predicted` without this ratio. Both must be above 0 and finite."""
        last = self.value
        seen = min(max(seconds / predicted, last / STEP), last * STEP)
        self.value = min(max(last + WEIGHT * (seen - last), 1 / BOUND), BOUND)


def running_rate(rate: float, tokens: int, seconds: float) -> float:
    """Prompt tokens per second after one more step, each step weighing by its time: over some 5 s of them it is
    tokens / seconds, where a mean of rates would let a few short prompts hide what a full chunk achieves."""
    return rate + min(1.0, seconds / 5.0) * (tokens / seconds - rate)
