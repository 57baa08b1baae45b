"""Parts of the snapshots that the dashboard shows, alike for a server and for a recorded run."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from statistics import mean, median
from typing import Any, NamedTuple

LATELY = 60.0  # seconds that attainment, slack and TTFT are over


class Outcome(NamedTuple):
    """How a request ended that has objectives. Slack in seconds: negative if it was late."""

    attained: bool
    ttft_slack: float
    tpot_slack: float


def present_class(ended: int, promised: Iterable[Outcome]) -> dict[str, Any]:
    """Return the attainment of a class of requests: all that ended, and those of them that have objectives."""
    outcomes = list(promised)
    return {
        "ended": ended,
        "attainment": round(mean(outcome.attained for outcome in outcomes), 4) if outcomes else None,
        "ttft_slack": _median(outcome.ttft_slack for outcome in outcomes),
        "tpot_slack": _median(outcome.tpot_slack for outcome in outcomes),
    }


def present_ttft(pairs: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Return the means of predicted and measured TTFT of requests with both; of all measured ones if none has both."""
    measured = [pair for pair in pairs if isfinite(pair[1])]
    both = [pair for pair in measured if isfinite(pair[0])]
    return {
        "predicted": number(mean(predicted for predicted, _ in both)) if both else None,
        "measured": number(mean(ttft for _, ttft in both or measured)) if measured else None,
        "requests": len(both or measured),
    }


def number(value: float) -> float | None:
    """Return a time in seconds to a microsecond; None if it is not finite, which JSON cannot say."""
    return round(value, 6) if isfinite(value) else None


def _median(values: Iterable[float]) -> float | None:
    known = [value for value in values if isfinite(value)]
    return number(median(known)) if known else None
