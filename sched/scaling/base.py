"""The interface of scalers, what they know of arrivals, and the number of replicas that follows over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil, exp, inf
from typing import NamedTuple, Protocol

from ..api.errors import InvalidValue
from ..api.request import Request
from ..routing.base import Fleet

SHORT, LONG = 10.0, 60.0  # seconds over which arrivals are averaged; the larger rate counts
PROMPT = 1024.0  # tokens; assumed until there is a request


class Arriving(NamedTuple):
    """What arrives, as of one time. It travels from engines to a scaler."""

    tokens: float = 0.0  # of prompts, per second
    ttft: float = inf
    prompt: float = PROMPT

    def rate(self, now: float) -> float:
        return self.tokens

    @classmethod
    def total(cls, several: Sequence[Arriving]) -> Arriving:
        """Return what arrives at several engines; means are weighted by tokens."""
        tokens = sum(outcome.tokens for outcome in several)
        timely = [outcome for outcome in several if outcome.ttft < inf]
        return cls(
            tokens,
            _mean([(outcome.ttft, outcome.tokens) for outcome in timely], inf),
            _mean([(outcome.prompt, outcome.tokens) for outcome in several], PROMPT),
        )


def _mean(weighted: Sequence[tuple[float, float]], default: float) -> float:
    whole = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / whole if whole > 0 else default


class Arrivals:
    """The prompt tokens that arrive per second, and their TTFT objective. Writer: the caller of `add`."""

    def __init__(self) -> None:
        self._rates = {SHORT: 0.0, LONG: 0.0}  # tokens per second
        self._since = 0.0
        self.ttft = inf  # seconds; mean of late, inf while no request had one
        self.prompt = PROMPT  # tokens; mean of late

    def add(self, request: Request, now: float) -> None:
        """Count a request that arrives."""
        self.count(request.prompt_length, request.slo.ttft, now)

    def count(self, prompt: int, ttft: float, now: float) -> None:
        """Count a prompt of so many tokens; ttft: inf for no objective."""
        for over, rate in self._rates.items():
            self._rates[over] = rate * exp((self._since - now) / over) + prompt / over
        self._since = now
        self.prompt += (prompt - self.prompt) / SHORT
        if ttft < inf:
            self.ttft = ttft if self.ttft == inf else self.ttft + (ttft - self.ttft) / SHORT

    def rate(self, now: float) -> float:
        """Return the prompt tokens per second at time `now`."""
        return max(rate * exp((self._since - now) / over) for over, rate in self._rates.items())

    def at(self, now: float) -> Arriving:
        """Return what arrives at time `now`."""
        return Arriving(self.rate(now), self.ttft, self.prompt)


class Arrived(Protocol):
    """What scalers know of arrivals: Arrivals, or Arriving from elsewhere."""

    @property
    def ttft(self) -> float: ...
    @property
    def prompt(self) -> float: ...
    def rate(self, now: float) -> float: ...


class Scaler(Protocol):
    """A rule for the number of replicas."""

    def needed(self, fleet: Fleet, arrivals: Arrived) -> float:
        """Return how many replicas like those of `fleet`, which accept requests, the load needs; not rounded."""


class Target:
    """The number of replicas over time. Writer: the caller of `at`.

    It rises at once and falls to the highest need of the last `hold` seconds, because a replica that
    is needed again takes long to start. `hold` may change.
    """

    def __init__(self, least: int, most: int, hold: float) -> None:
        if not 1 <= least <= most:
            raise InvalidValue(f"{least=} and {most=} replicas must be at least 1, in this order", "scaling")
        if not hold >= 0:
            raise InvalidValue(f"{hold=} must be 0 or more seconds", "scaling")
        self._least = least
        self._most = most
        self.hold = hold
        self._lately: deque[tuple[float, int]] = deque()  # (time, replicas needed), of falling need

    def at(self, now: float, needed: float) -> int:
        """Return the number of replicas that should serve from `now` on."""
        whole = min(self._most, max(self._least, ceil(needed)))
        while self._lately and self._lately[-1][1] <= whole:
            self._lately.pop()
        self._lately.append((now, whole))
        while self._lately[0][0] < now - self.hold:
            self._lately.popleft()
        return self._lately[0][1]
