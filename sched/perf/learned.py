"""The default step-time model: the general form of padded loads, fitted to a profile and learned from every step."""

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

FORGETTING = 0.99  # a step counts half after 69 others
ANCHOR = 10.0  # steps that the whole profile counts as, for good
EVERY = 4  # steps from one solution of the coefficients to the next: factors are corrected at each
LEAST = 0.05  # weight of one step in the factor of its program, where many have been seen
OUTLIER = 3.0  # times the usual error that a step's may be, to count in full
SURE = 0.05  # errors up to that count in full
USUAL = 0.05  # of one step in the usual error
NEAR = 1.2  # times too fast or too slow until which that goes on
TINY = 1e-12  # seconds
STREAK = 4  # steps in a row, each more than STEP times too fast or each as much too slow, that are no accident
SCALE = np.array([1.0, 1.0, 1e3, 10.0, 1e6, 1e4, 1e5, 1.0])  # brings the terms of LINEAR near 1, for conditioning


class LearnedModel:
    """T = factor(program) * general form(padded load), see Buckets and Coefficients. A PerfModel.

    The coefficients are fitted to `points` and corrected by recursive least squares with forgetting, from steps of
    every kind; the points stay in with the weight of ANCHOR steps, so that what serving does not show is kept. The
    factor of a program is a moving average of measured/fitted: programs of one form may differ in speed. In the profile
    it counts as far as programs differ by more than their steps do (see `_shrunk`): a program that is taken for slower
    than it is may never run again, and the error would stay.

    A step that is far longer or shorter than predicted counts as less far off (see `_clipped`): a pause is no trend.
    After STREAK such steps in a row all that is known, the profile too, is scaled by each further one: the machine is
    another than it was when it was measured. Writer: the Scheduler that observes steps.

    points: measured (load, seconds). p_moe: share of the experts that a token uses. coefficients: fitted before;
    where they are given and points are not, SAMPLED loads by them are the anchor. Raises InvalidValue without either.
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
        self._usual = STEP - 1.0  # error of a step, as a share: a moving average
        self._streak = 0  # steps in a row that were far too slow; less than 0: too fast
        self._before = self._learning.state(), list(self._factors)  # when the streak began
        self.version = 0
        self._form = self._formed()
        first = self.step_time(Load().add_chunk(chunk, 0))
        self._prefill_rate = chunk / first if first > 0 else float("inf")

    @property
    def coefficients(self) -> Coefficients:
        """As learned so far, without the factors of programs."""
        return self._form.coefficients

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
        """Whether steps have been far off, and on the same side, for so long that the machine must be another. What
        the first of them taught is forgotten: it was of their own program alone."""
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
        """Within OUTLIER times the usual error, and never more than STEP times faster or slower. Where times change for
        good the usual error grows, and lets them through."""
        error = min(max(seconds / predicted, predicted / seconds) - 1.0, STEP - 1.0)
        most = 1.0 + min(max(OUTLIER * self._usual, SURE), STEP - 1.0)
        self._usual += USUAL * (error - self._usual)
        return min(max(seconds, predicted / most), predicted * most)

    def _row(self, load: Load) -> Array:
        terms: Array = np.array(row(load, self._p_moe)) / SCALE
        return terms

    def _correct(self, program: int, ratio: float) -> None:
        """The mean of all that was seen of a program, then a moving average."""
        seen = self._seen[program] = self._seen[program] + 1
        moved = self._factors[program] + max(LEAST, 1.0 / (1 + seen)) * (ratio - self._factors[program])
        self._factors[program] = min(max(moved, 1 / BOUND), BOUND)

    def _formed(self) -> Padded:
        values = (self._learning.weights / SCALE).tolist()
        made = Coefficients(**dict(zip(LINEAR, values, strict=True)), p_moe=self._p_moe)
        return Padded(made, self._buckets, tuple(self._factors))


def _shrunk(ratios: Sequence[tuple[int, float]], programs: int) -> tuple[list[float], list[int]]:
    """Factors of programs from (program, measured/fitted), and how many steps each is of. A program's mean counts by
    the share of its variance that is not explained by the steps' own (James and Stein): with few and noisy steps, and
    programs much alike, all factors stay near 1."""
    factors, seen = [1.0] * programs, [0] * programs
    if not ratios:
        return factors, seen
    which, ratio = np.array([one for one, _ in ratios]), np.array([one for _, one in ratios])
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
