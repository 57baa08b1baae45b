"""The interface of scalers, what they know of arrivals, and the number of replicas that follows over time."""

from __future__ import annotations

from collections import deque
from math import ceil, exp, inf
from typing import Protocol

from ..api.errors import InvalidValue
from ..api.request import Request
from ..routing.base import Fleet

SHORT, LONG = 10.0, 60.0  # seconds over which arrivals are averaged; the larger rate counts


class Arrivals:
    """The prompt tokens that arrive per second, and their TTFT objective. Writer: the caller of `add`."""

    def __init__(self) -> None:
        self._rates = {SHORT: 0.0, LONG: 0.0}  # tokens per second
        self._since = 0.0
        self.ttft = inf  # seconds; mean of late, inf while no request had one
        self.prompt = 1024.0  # tokens; mean of late

    def add(self, request: Request, now: float) -> None:
        """Count a request that arrives."""
        for over, rate in self._rates.items():
            self._rates[over] = rate * exp((self._since - now) / over) + request.prompt_length / over
        self._since = now
        self.prompt += (request.prompt_length - self.prompt) / SHORT
        ttft = request.slo.ttft
        if ttft < inf:
            self.ttft = ttft if self.ttft == inf else self.ttft + (ttft - self.ttft) / SHORT

    def rate(self, now: float) -> float:
        """Return the prompt tokens per second at time `now`."""
        return max(rate * exp((self._since - now) / over) for over, rate in self._rates.items())


class Scaler(Protocol):
    """A rule for the number of replicas."""

    def needed(self, fleet: Fleet, arrivals: Arrivals) -> float:
        """Return how many replicas like those of `fleet`, which accept requests, the load needs; not rounded."""


class Target:
    """The number of replicas over time. Writer: the caller of `at`.

    It rises at once and falls to the highest need of the last `hold` seconds, because a replica that
    is needed again takes long to start.
    """

    def __init__(self, least: int, most: int, hold: float) -> None:
        if not 1 <= least <= most:
            raise InvalidValue(f"{least=} and {most=} replicas must be at least 1, in this order", "scaling")
        if not hold >= 0:
            raise InvalidValue(f"{hold=} must be 0 or more seconds", "scaling")
        self._least = least
        self._most = most
        self._hold = hold
        self._lately: deque[tuple[float, int]] = deque()  # (time, replicas needed), of falling need

    def at(self, now: float, needed: float) -> int:
        """Return the number of replicas that should serve from `now` on."""
        whole = min(self._most, max(self._least, ceil(needed)))
        while self._lately and self._lately[-1][1] <= whole:
            self._lately.pop()
        self._lately.append((now, whole))
        while self._lately[0][0] < now - self._hold:
            self._lately.popleft()
        return self._lately[0][1]
