"""Predicted times of first tokens, made when prompts are placed, and their errors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf, log2
from statistics import median
from typing import ClassVar, NamedTuple

from ..api.metric import GAUGE, Metric, row, summary
from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request
from .first_tokens import Shares, Waits

RECENT = 512  # predictions per path in the median error
PATHS = ("prefill", "decode")
SHORTEST, LONGEST = 2.0**-6, 2.0**10  # seconds: range of ttft that is told apart


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of the predictions on one path. Times are seconds from arrival to first token, summed."""

    count: int = 0
    predicted: float = summary(
        "predicted_ttft_seconds", "Predicted time to first token, when the prompt was routed.", of="count"
    )
    measured: float = summary(
        "measured_ttft_seconds", "Measured time to first token of requests with a prediction.", of="count"
    )
    errors: float = 0.0  # |predicted - measured| / measured, summed
    median: float | None = row(  # None before the first
        GAUGE,
        "ttft_prediction_median_error",
        f"Median relative error of the latest {RECENT} TTFT predictions.",
        default=None,
    )

    DERIVED: ClassVar = (
        Metric(
            GAUGE,
            "ttft_prediction_mape",
            "Mean absolute error of predicted TTFT, relative to the measured TTFT.",
            attribute="mape",
        ),
    )

    @property
    def mape(self) -> float:
        """Mean absolute error relative to the measurement; nan before the first."""
        return self.errors / self.count if self.count else float("nan")


class _Path:
    """The accuracy of one path. Writer: TTFTPredictions."""

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


def path_of(role: Role) -> str:
    """Return the path of a prompt on an instance of this role."""
    return "decode" if role is Role.DECODE else "prefill"


class TTFTPrediction(NamedTuple):
    """A predicted first token: its path, when it was predicted, from which waits, and its time `at`."""

    path: str
    now: float
    waits: Waits
    later: float
    at: float


class TTFTPredictions:
    """The predictions of unfinished requests, and the accuracy of those of finished ones. Writer: the Cluster.

    The path is `decode` if the prompt was deflected to a decode instance, and `prefill` otherwise.
    A request that moves counts with its last prediction, also if it has become best effort since. A request that
    asked for best effort does not count, because it is served from what others leave.

    The shares of the waits are learned per path and octave of ttft, because most policies serve
    tighter deadlines first.
    """

    def __init__(self) -> None:
        self._open: dict[int, TTFTPrediction] = {}
        self._awaited: set[int] = set()  # requests without a first token yet
        self._paths = {path: _Path() for path in PATHS}
        self._shares: dict[tuple[str, int], Shares] = {}  # by path and octave of ttft

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """Accuracy so far, by path."""
        return {path: record.accuracy for path, record in self._paths.items()}

    def note(self, request: Request, role: Role, now: float, waits: Waits, later: float = 0.0) -> None:
        """Predict the first token of a request that is placed now, on an instance of this role.

        `later`: seconds from the first token until it is delivered.
        """
        if not sum(waits) < inf:
            return
        path = path_of(role)
        at = now + self.predict(request, role, waits) + later
        self._open[request.id] = TTFTPrediction(path, now, waits, later, at)
        self._awaited.add(request.id)

    def predict(self, request: Request, role: Role, waits: Waits) -> float:
        """Predict the seconds to the first token of a request on an instance of this role."""
        return self._of(path_of(role), request).seconds(waits) if sum(waits) < inf else inf

    def _of(self, path: str, request: Request) -> Shares:
        octave = round(log2(min(max(request.slo.ttft, SHORTEST), LONGEST)))
        return self._shares.setdefault((path, octave), Shares())

    def of(self, request: Request) -> tuple[float, float] | None:
        """Return the predicted and the measured seconds to the first token of a request.

        None if there was no prediction, no token came, or the request asked for best effort.
        """
        prediction, first = self._open.get(request.id), request.first_token_at
        if prediction is None or first is None or request.asked.tier == BEST_EFFORT or first <= request.arrival:
            return None
        return prediction.at - request.arrival, first - request.arrival

    def predicted(self, request: Request) -> float | None:
        """Return the predicted seconds to the first token of a request before it is `over`; None if there is none."""
        prediction = self._open.get(request.id)
        return None if prediction is None else prediction.at - request.arrival

    def error(self, request: Request) -> float | None:
        """Return |predicted - measured| / measured of a request before it is `over`; None as for `of`."""
        pair = self.of(request)
        return None if pair is None else abs(pair[0] / pair[1] - 1.0)

    def came(self, request: Request) -> None:
        """Learn from the first token of a request. Later tokens change nothing."""
        if request.id not in self._awaited:
            return
        self._awaited.discard(request.id)
        prediction, first = self._open[request.id], request.first_token_at
        if first is not None and first > prediction.now + prediction.later and request.tier != BEST_EFFORT:
            self._of(prediction.path, request).learn(prediction.waits, first - prediction.now - prediction.later)

    def over(self, request: Request) -> None:
        """Record the accuracy of a request that has ended, for any reason."""
        self.came(request)
        pair, prediction = self.of(request), self._open.pop(request.id, None)
        if pair is not None and prediction is not None:
            self._paths[prediction.path].add(*pair)
