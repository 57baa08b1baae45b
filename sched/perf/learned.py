"""The default step-time model: the general form on padded loads, fitted to a profile and learned from every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from .buckets import NONE, Buckets, Padded
from .fit import LINEAR, proportional, row
from .model import Coefficients
from .online import BOUND, STEP, running_rate
from .recursive import Recursive

FORGETTING = 0.99  # per step: the weight of a step halves after 69 others
ANCHOR = 10.0  # steps that the whole profile permanently counts as
EVERY = 4  # steps between two solutions of the coefficients; factors are corrected at each step
LEAST = 0.05  # least weight of one step in the factor of its program
OUTLIER = 3.0  # a step counts in full up to this multiple of the usual error
SURE = 0.05  # errors up to this one always count in full
USUAL = 0.05  # weight of one step in the usual error
NEAR = 1.2  # a streak continues while steps are too fast or too slow by more than this factor
TINY = 1e-12  # seconds
STREAK = 4  # this many steps in a row, all more than STEP times too fast or all too slow, are no accident
SCALE = np.array([1.0, 1.0, 1e3, 10.0, 1e6, 1e4, 1e5, 1.0])  # brings the terms of LINEAR near 1, for conditioning


class LearnedModel:
    """T = factor(program) * general form(padded load); see `Buckets` and `Coefficients`. A `PerfModel`.

    The coefficients are fitted to `points` and corrected by recursive least squares with forgetting, from
    steps of every kind. The points remain with the weight of ANCHOR steps, to keep what serving does not
    show. The factor of a program is a moving average of measured/fitted time, since programs of one form
    may differ in speed. A profile counts only as far as programs differ by more than their steps do (see
    `_shrunk`), because a program that is wrongly believed to be slow may never run again.

    A step that is far longer or shorter than predicted counts as less far off (see `_clipped`): a pause is
    no trend. After STREAK such steps in a row, each further one scales everything known, including the
    profile: the machine is not the one that was measured. Writer: the Scheduler that observes steps.

    points: measured (load, seconds). p_moe: share of the experts that a token uses. coefficients: from an
    earlier fit; `points`, if given, then serve as the anchor and for the factors. Raises InvalidValue without either.
    """

    def __init__(
        self,
        points: Iterable[tuple[Load, float]] = (),
        buckets: Buckets = NONE,
        *,
        p_moe: float = 0.0,
        coefficients: Coefficients | None = None,
        chunk: int = 8192,
    ) -> None:
        steps = [(load, seconds) for load, seconds in points if seconds > 0]
        if not steps and coefficients is None:
            raise InvalidValue("no measured steps to fit", "points")
        self._buckets = buckets
        self._p_moe = p_moe if coefficients is None else coefficients.p_moe
        placed = [buckets.placed(load) for load, _ in steps]
        seconds = np.array([time for _, time in steps])
        table = np.array([self._row(load) for _, load in placed]).reshape(len(steps), len(SCALE))
        if coefficients is None:
            weights = proportional(table, seconds)
        else:
            weights = np.array([getattr(coefficients, name) for name in LINEAR]) * SCALE
        self._learning = Recursive(weights, FORGETTING, table / seconds[:, None], ANCHOR, EVERY)
        ratios = [
            (program, time / max(float(np.dot(self._row(load), weights)), TINY))
            for (program, load), time in zip(placed, seconds.tolist(), strict=True)
        ]
        self._factors, self._seen = _shrunk(ratios, buckets.programs)
        self._usual = STEP - 1.0  # usual error of a step, as a share: a moving average
        self._streak = 0  # steps in a row that were far too slow; negative: far too fast
        self._before = self._learning.state(), list(self._factors)  # state when the streak began
        self.version = 0
        self._form = self._formed()
        first = self.step_time(Load().add_chunk(chunk, 0))
        self._prefill_rate = chunk / first if first > 0 else float("inf")

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients as learned so far, without the factors of programs."""
        return self._form.coefficients

    @property
    def form(self) -> Padded:
        """The coefficients and factors as learned so far."""
        return self._form

    @property
    def prefill_rate(self) -> float:
        return self._prefill_rate

    def step_time(self, load: Load) -> float:
        return self._form.step_time(load)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self._form.decode_times(rows, longest, context)

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        return self._form.prefill_times(tokens, context, chunk)

    def observe(self, load: Load, seconds: float) -> None:
        predicted = self._form.step_time(load)
        if not 0 < seconds < float("inf") or not predicted > 0:
            return
        self.version += 1
        if load.prefill and not load.decode:
            self._prefill_rate = running_rate(self._prefill_rate, load.prefill, seconds)
        if self._another(seconds / predicted):
            seconds = min(max(seconds, predicted / STEP), predicted * STEP)
            self._learning.scale(seconds / max(self._form.step_time(load), TINY))
            self._form = self._formed()
            return
        seconds = self._clipped(seconds, predicted)
        program, padded = self._buckets.placed(load)
        terms = self._row(padded)
        scale = predicted / self._factors[program]
        self._learning.update(terms / scale, seconds / predicted)
        fitted = float(terms @ self._learning.weights)
        if fitted > 0:
            self._correct(program, seconds / fitted)
        self._form = self._formed()

    def _another(self, ratio: float) -> bool:
        """Return whether steps have been far off, to the same side, for so long that the machine must have changed.

        What the first steps of the streak taught is then undone, since it concerns only their programs.
        """
        least = STEP if abs(self._streak) <= STREAK else NEAR
        far = (ratio > least) - (ratio < 1 / least)
        self._streak = far + (self._streak if far * self._streak > 0 else 0)
        if abs(self._streak) == 1:
            self._before = self._learning.state(), list(self._factors)
        elif abs(self._streak) == STREAK + 1:
            state, self._factors = self._before
            self._learning.restore(state)
            self._form = self._formed()
        return abs(self._streak) > STREAK

    def _clipped(self, seconds: float, predicted: float) -> float:
        """Clip a measured time to OUTLIER times the usual error, and at most STEP times faster or slower.

        If times change permanently, the usual error grows and lets them through.
        """
        error = min(max(seconds / predicted, predicted / seconds) - 1.0, STEP - 1.0)
        most = 1.0 + min(max(OUTLIER * self._usual, SURE), STEP - 1.0)
        self._usual += USUAL * (error - self._usual)
        return min(max(seconds, predicted / most), predicted * most)

    def _row(self, load: Load) -> Array:
        terms: Array = np.array(row(load, self._p_moe)) / SCALE
        return terms

    def _correct(self, program: int, ratio: float) -> None:
        """Correct the factor of a program: the mean of all its steps at first, then a moving average."""
        seen = self._seen[program] = self._seen[program] + 1
        moved = self._factors[program] + max(LEAST, 1.0 / (1 + seen)) * (ratio - self._factors[program])
        self._factors[program] = min(max(moved, 1 / BOUND), BOUND)

    def _formed(self) -> Padded:
        values = (self._learning.weights / SCALE).tolist()
        coefficients = Coefficients(**dict(zip(LINEAR, values, strict=True)), p_moe=self._p_moe)
        return Padded(coefficients, self._buckets, tuple(self._factors))


def _shrunk(ratios: Sequence[tuple[int, float]], programs: int) -> tuple[list[float], list[int]]:
    """Estimate the factors of programs from (program, measured/fitted), and count the steps of each.

    The mean of a program is weighted by the share of its variance that its steps do not explain (James and
    Stein). If steps are few and noisy and programs similar, all factors stay near 1.
    """
    factors, seen = [1.0] * programs, [0] * programs
    if not ratios:
        return factors, seen
    which, ratio = np.array([index for index, _ in ratios]), np.array([value for _, value in ratios])
    counts = np.bincount(which, minlength=programs)
    there = np.flatnonzero(counts)
    means = np.bincount(which, ratio, programs)[there] / counts[there]
    spare = len(ratios) - len(there)
    within = float(((ratio - means[there.searchsorted(which)]) ** 2).sum()) / spare if spare else 0.0
    own = within / counts[there]
    between = max(0.0, float(((means - 1.0) ** 2 - own).mean()))
    share = between / np.maximum(between + own, TINY)
    for program, factor in zip(there.tolist(), (1.0 + share * (means - 1.0)).tolist(), strict=True):
        factors[program], seen[program] = min(max(factor, 1 / BOUND), BOUND), int(counts[program])
    return factors, seen
