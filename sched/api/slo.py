"""Latency objectives, and the deadlines of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .errors import InvalidValue, short

ANSWER = "answer"
THINKING = "thinking"
SHORTEST, LONGEST = 1e-9, 1e9  # seconds: keeps sums, differences and quotients of objectives finite
HEAVIEST = 1000.0


@dataclass(frozen=True, slots=True)
class SLO:
    """The latency objectives of one request, in seconds.

    `ttft`: arrival to first token. `tpot`: mean per token after it. `tbt`: largest gap between two
    tokens, if set. `stages`: (stage, tpot) pairs that override `tpot` for the tokens of that stage
    (`thinking`, `answer`). Each value is between SHORTEST and LONGEST, or infinite for no
    objective. `weight`: of such requests where not all can be on time, from 1 / HEAVIEST to HEAVIEST;
    a prompt of weight 2 counts like two of weight 1. Raises InvalidValue otherwise.
    """

    ttft: float = 8.0
    tpot: float = 0.050
    tbt: float | None = None
    stages: tuple[tuple[str, float], ...] = ()
    weight: float = 1.0

    def __post_init__(self) -> None:
        named = [("ttft", self.ttft), ("tpot", self.tpot), ("tbt", self.tbt)]
        named += [(f"stages[{short(stage)}].tpot", tpot) for stage, tpot in self.stages]
        for name, value in named:
            if value is not None and not (SHORTEST <= value <= LONGEST or value == inf):  # also rejects NaN
                allowed = f"a positive number of seconds, from {SHORTEST:g} to {LONGEST:g}, or infinite"
                raise InvalidValue(f"SLO {name}={short(value)} must be {allowed}", name)
        if not 1 / HEAVIEST <= self.weight <= HEAVIEST:
            raise InvalidValue(
                f"SLO weight={short(self.weight)} must be from {1 / HEAVIEST:g} to {HEAVIEST:g}", "weight"
            )
        for stage, _ in self.stages:
            if stage not in (THINKING, ANSWER):
                raise InvalidValue(f"SLO stage {short(stage)} must be one of {THINKING!r}, {ANSWER!r}", "stages")

    def tpot_of(self, stage: str) -> float:
        """Return the seconds allowed per token of `stage`."""
        for name, tpot in self.stages:
            if name == stage:
                return tpot
        return self.tpot


NO_SLO = SLO(ttft=inf, tpot=inf)


def deadline(slo: SLO, arrival: float, first_token_at: float | None, budget: float) -> float:
    """Return the deadline of the next token, in seconds on the scheduler's clock.

    `budget` is the sum of the tpot of every token after the first, up to and including the next one
    (0 for the first token itself). Before the first token the anchor is `arrival + ttft`. After it
    the anchor is the time of the first token, even if that was late: with an anchor in the past,
    one late first token would make every later token late too.
    """
    anchor = arrival + slo.ttft if first_token_at is None else first_token_at
    return anchor + budget
