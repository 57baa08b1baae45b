"""Online corrections shared by all step-time models: small and bounded."""

from __future__ import annotations

WEIGHT = 0.05  # of one step: half of a drift is learned in 14 steps
STEP = 2.0  # a step counts as at most this many times faster or slower than expected: a pause is no trend
BOUND = 10.0  # bound of the total correction of a model


class Ratio:
    """A moving average of measured/predicted, 1 if the model is right.

    No step moves it by more than 5 %, and it stays within [1/BOUND, BOUND]. Writer: the model that holds it.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, predicted: float, seconds: float) -> None:
        """Update with one step, `predicted` without this ratio. Both times must be positive and finite."""
        last = self.value
        seen = min(max(seconds / predicted, last / STEP), last * STEP)
        self.value = min(max(last + WEIGHT * (seen - last), 1 / BOUND), BOUND)


def running_rate(rate: float, tokens: int, seconds: float) -> float:
    """Update a rate of prompt tokens per second with one step, weighted by its time.

    Averaged over about 5 s of steps this is tokens / seconds. In a mean of rates, a few short prompts would
    hide what a full chunk achieves.
    """
    return rate + min(1.0, seconds / 5.0) * (tokens / seconds - rate)
