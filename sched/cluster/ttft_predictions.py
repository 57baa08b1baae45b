"""First tokens as predicted when their prompts were placed, beside when they came."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf, log2
from statistics import median
from typing import NamedTuple

from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request
from .first_tokens import Shares, Waits

RECENT = 512  # ttft_predictions of a path that its median error is of
PATHS = ("prefill", "decode")
SHORTEST, LONGEST = 2.0**-6, 2.0**10  # seconds of ttft: shorter and longer ones are taken as these


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of the ttft_predictions of one path. Seconds from a request's arrival to its first token, summed."""

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
    """What is known of one path. Writer: TTFTPredictions."""

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


class TTFTPrediction(NamedTuple):
    """Of one first token: its path, when it was made and of what, and when the token comes."""

    path: str
    now: float
    waits: Waits
    later: float
    at: float


class TTFTPredictions:
    """What was predicted of requests under way, and how right it was for those that are over. Writer: the Cluster.

    A path is `prefill` where the prompt was computed by an instance that prefills (or does both), and `decode` where
    it was deflected to one that decodes. A request that is moved is judged by its last forecast, one that becomes best
    effort by none: it waits for what others leave.

    How much of its waits a request waits is learned for each path, and for requests with about the same ttft: most
    policies let tighter deadlines pass.
    """

    def __init__(self) -> None:
        self._open: dict[int, TTFTPrediction] = {}
        self._awaited: set[int] = set()  # those whose first token has not come
        self._paths = {path: _Path() for path in PATHS}
        self._shares: dict[tuple[str, int], Shares] = {}  # by path, and octave of the ttft

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """Of the ttft_predictions so far, by path."""
        return {path: one.accuracy for path, one in self._paths.items()}

    def note(self, request: Request, role: Role, now: float, waits: Waits, later: float = 0.0) -> None:
        """What a request that is placed now, on an instance of this role, may have to wait for. later: seconds from its
        first token to when it is told."""
        if not sum(waits) < inf:
            return
        path = "decode" if role is Role.DECODE else "prefill"
        at = now + self._of(path, request).seconds(waits) + later
        self._open[request.id] = TTFTPrediction(path, now, waits, later, at)
        self._awaited.add(request.id)

    def _of(self, path: str, request: Request) -> Shares:
        octave = round(log2(min(max(request.slo.ttft, SHORTEST), LONGEST)))
        return self._shares.setdefault((path, octave), Shares())

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

    def came(self, request: Request) -> None:
        """A token of a request has come; the first says how much of its waits it waited."""
        if request.id not in self._awaited:
            return
        self._awaited.discard(request.id)
        made, first = self._open[request.id], request.first_token_at
        if first is not None and first > made.now + made.later and request.tier != BEST_EFFORT:
            self._of(made.path, request).learn(made.waits, first - made.now - made.later)

    def over(self, request: Request) -> None:
        """A request has ended, for whatever reason."""
        self.came(request)
        pair, made = self.of(request), self._open.pop(request.id, None)
        if pair is not None and made is not None:
            self._paths[made.path].add(*pair)
