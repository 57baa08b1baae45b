"""First tokens as predicted when their prompts were placed, beside when they came."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from .policy import Role
from .request import BEST_EFFORT, Request

RECENT = 512  # forecasts of a path that its median error is of
DELAYS = 64  # latest first tokens with no prompt before theirs, whose delays the host's is the median of
PATHS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of the forecasts of one path. Seconds from a request's arrival to its first token, summed."""

    count: int = 0
    predicted: float = 0.0
    measured: float = 0.0
    errors: float = 0.0  # |predicted - measured| / measured, summed
    median: float | None = None  # of the latest RECENT errors; None before the first

    @property
    def mape(self) -> float:
        """Mean absolute percentage error, as a share; nan before the first."""
        return self.errors / self.count if self.count else float("nan")


class _Path:
    """What is known of one path. Writer: Forecasts."""

    def __init__(self) -> None:
        self.accuracy = Accuracy()
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, predicted: float, measured: float) -> None:
        error, past = abs(predicted - measured) / measured, self.accuracy
        self._recent.append(error)
        self.accuracy = Accuracy(
            past.count + 1,
            past.predicted + predicted,
            past.measured + measured,
            past.errors + error,
            median(self._recent),
        )


class Forecast(NamedTuple):
    """Of one first token: its path, when it comes, the host's delay in that, and whether prompts waited before it."""

    path: str
    at: float
    delay: float
    queued: bool


class Forecasts:
    """What was predicted of requests under way, and how right it was for those that are over. Writer: the Cluster.

    A path is `prefill` where the prompt was computed by an instance that prefills (or does both), and `decode` where
    it was deflected to one that decodes. A request that is moved is judged by its last forecast, one that becomes best
    effort by none: it waits for what others leave.

    What the host adds to a first token, no step-time model sees: it is measured where no prompt waited before.
    """

    def __init__(self) -> None:
        self._open: dict[int, Forecast] = {}
        self._paths = {path: _Path() for path in PATHS}
        self._delays: deque[float] = deque(maxlen=DELAYS)

    @property
    def delay(self) -> float:
        """Seconds that the host adds to a first token; 0 before one was measured."""
        return max(0.0, median(self._delays)) if self._delays else 0.0

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """Of the forecasts so far, by path."""
        return {path: one.accuracy for path, one in self._paths.items()}

    def note(self, id: int, role: Role, at: float, *, queued: bool = True) -> None:
        """By its steps its first token comes out at `at`, by the executors' clock, on an instance of this role. queued:
        prompts wait before it."""
        if at < float("inf"):
            delay = self.delay
            self._open[id] = Forecast("decode" if role is Role.DECODE else "prefill", at + delay, delay, queued)

    def of(self, request: Request) -> tuple[float, float] | None:
        """Predicted and measured seconds to its first token. None where nothing was predicted of it, no token came, or
        it became best effort."""
        made, first = self._open.get(request.id), request.first_token_at
        if made is None or first is None or request.tier == BEST_EFFORT or first <= request.arrival:
            return None
        return made.at - request.arrival, first - request.arrival

    def error(self, request: Request) -> float | None:
        """|predicted - measured| / measured of a request that is about to be `over`; None as for `of`."""
        pair = self.of(request)
        return None if pair is None else abs(pair[0] / pair[1] - 1.0)

    def over(self, request: Request) -> None:
        """A request has ended, for whatever reason."""
        pair, made = self.of(request), self._open.pop(request.id, None)
        if pair is None or made is None:
            return
        predicted, measured = pair
        self._paths[made.path].add(predicted, measured)
        if not made.queued:
            self._delays.append(measured - (predicted - made.delay))
