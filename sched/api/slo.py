"""What a request was promised, and when each of its tokens is due."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .errors import InvalidValue, short

ANSWER = "answer"
THINKING = "thinking"
SHORTEST, LONGEST = 1e-9, 1e9  # seconds: sums, differences and quotients of objectives stay finite


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency objectives of one request, in seconds.

    ttft: arrival to first token. tpot: per token after it, as a mean. tbt: largest gap between two tokens, where
    set. stages: (stage name, tpot) pairs that override `tpot` for tokens of that stage (`thinking`, `answer`). Each is
    from SHORTEST to LONGEST, or infinite where nothing is promised; InvalidValue otherwise.
    """

    ttft: float = 8.0
    tpot: float = 0.050
    tbt: float | None = None
    stages: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        named = [("ttft", self.ttft), ("tpot", self.tpot), ("tbt", self.tbt)]
        named += [(f"stages[{short(stage)}].tpot", tpot) for stage, tpot in self.stages]
        for name, value in named:
            if value is not None and not (SHORTEST <= value <= LONGEST or value == inf):  # NaN neither
                allowed = f"a positive number of seconds, from {SHORTEST:g} to {LONGEST:g}, or infinite"
                raise InvalidValue(f"SLO {name}={short(value)} must be {allowed}", name)
        for stage, _ in self.stages:
            if stage not in (THINKING, ANSWER):
                raise InvalidValue(f"SLO stage {short(stage)} must be one of {THINKING!r}, {ANSWER!r}", "stages")

    def tpot_of(self, stage: str) -> float:
        """Seconds allowed for one token of `stage`."""
        for name, tpot in self.stages:
            if name == stage:
                return tpot
        return self.tpot


NO_SLO = SLO(ttft=inf, tpot=inf)


def deadline(slo: SLO, arrival: float, first_token_at: float | None, budget: float) -> float:
    """When the next token is due, in seconds on the scheduler's clock.

    `budget` is the sum of the tpot of every token after the first, up to and including the one asked for (0 for
    the first token itself). Before the first token the anchor is the envelope `arrival + ttft`; after it the
    first token's own time, also when it was late: an anchor that nobody can meet any more starts a domino.
    """
    anchor = arrival + slo.ttft if first_token_at is None else first_token_at
    return anchor + budget
