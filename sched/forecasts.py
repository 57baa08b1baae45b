"""First tokens as predicted when their prompts were placed, beside when they came."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from .policy import Role
from .request import BEST_EFFORT, Request

RECENT = 512  # forecasts of a path that its median error is of
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


@dataclass(slots=True)
class _Path:
    """Sums and the latest errors of one path. Writer: Forecasts."""

    count: int = 0
    predicted: float = 0.0
    measured: float = 0.0
    errors: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, predicted: float, measured: float) -> None:
        error = abs(predicted - measured) / measured
        self.count += 1
        self.predicted += predicted
        self.measured += measured
        self.errors += error
        self.recent.append(error)

    def accuracy(self) -> Accuracy:
        middle = median(self.recent) if self.recent else None
        return Accuracy(self.count, self.predicted, self.measured, self.errors, middle)


class Forecasts:
    """What was predicted of requests under way, and how right it was for those that are over. Writer: the Cluster.

    A path is `prefill` where the prompt was computed by an instance that prefills (or does both), and `decode` where
    it was deflected to one that decodes. A request that is moved is judged by its last forecast, one that becomes best
    effort by none: it waits for what others leave.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, float]] = {}
        self._paths = {path: _Path() for path in PATHS}

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """Of the forecasts so far, by path."""
        return {path: one.accuracy() for path, one in self._paths.items()}

    def note(self, id: int, role: Role, at: float) -> None:
        """Its first token is predicted to come out at `at`, by the executors' clock, on an instance of this role."""
        if at < float("inf"):
            self._open[id] = ("decode" if role is Role.DECODE else "prefill", at)

    def error(self, request: Request) -> float | None:
        """|predicted - measured| / measured time to first token of a request that is about to be `over`.

        None where nothing was predicted of it, no token came, or it became best effort.
        """
        path, at = self._open.get(request.id, ("", 0.0))
        if not path or request.first_token_at is None or request.tier == BEST_EFFORT:
            return None
        measured = request.first_token_at - request.arrival
        return abs((at - request.arrival) / measured - 1.0) if measured > 0 else None

    def over(self, request: Request) -> None:
        """A request has ended, for whatever reason."""
        path, at = self._open.pop(request.id, ("", 0.0))
        if not path or request.first_token_at is None or request.tier == BEST_EFFORT:
            return
        predicted, measured = at - request.arrival, request.first_token_at - request.arrival
        if measured > 0:
            self._paths[path].add(predicted, measured)
