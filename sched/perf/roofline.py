"""SLOs-Serve's roofline T = max over l of k1_l*tokens + k2_l*drafts + b_l (section 3.1.1), with a context term."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from .fit import log_error, proportional
from .model import whole_steps

ROUNDS = 30  # limit of the alternation, which seldom takes ten
SPLITS = (0.2, 0.35, 0.5, 0.65, 0.8)  # starting points, as quantiles of tokens: the fit only finds local optima
Owner = np.ndarray[Any, np.dtype[np.intp]]  # the term that each step is assigned to


class Term(NamedTuple):
    """One bottleneck of a step, such as arithmetic or reading the weights."""

    token: float  # seconds per new token (k1)
    draft: float  # seconds per step of the draft model (k2)
    base: float  # seconds (b)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The slowest of its terms, plus `context` seconds per token of context that is read. A `Form`.

    As published, `context` is 0, and the paper's scheduler must subtract c*sum(L) from the time available.
    With `context` in the model, the predictions are the same and callers do not have to.
    """

    terms: tuple[Term, ...]
    context: float = 0.0

    def __post_init__(self) -> None:
        if not self.terms:
            raise InvalidValue("terms=() of a roofline must be one or more", "terms")
        for name, value in [("context", self.context), *((n, v) for t in self.terms for n, v in t._asdict().items())]:
            if not 0 <= value < float("inf"):
                raise InvalidValue(f"{name}={value!r} must be 0 or more seconds", name)

    def step_time(self, load: Load) -> float:
        tokens, drafts = load.tokens, load.drafts
        slowest = max(k1 * tokens + k2 * drafts + b for k1, k2, b in self.terms)
        return slowest + self.context * (load.context + load.prefix)

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        result: Array = self._slowest(np.asarray(rows, dtype=float)) + self.context * context
        return result

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        full, last = whole_steps(tokens, chunk)
        short = last > 0
        steps = full + short
        times = full * max(k1 * chunk + b for k1, _, b in self.terms) + short * self._slowest(last)
        result: Array = times + self.context * steps * (context + chunk * (steps - 1.0) / 2)
        return result

    def _slowest(self, tokens: Array) -> Array:
        result: Array = np.max([k1 * tokens + b for k1, _, b in self.terms], axis=0)
        return result

    @classmethod
    def fitted(cls, measured: Iterable[tuple[Load, float]], *, terms: int = 2, context: bool = True) -> Roofline:
        """Fit by alternation: assign each step to its slowest term, fit the terms (`fit.proportional`), repeat.

        Takes the best of several starts, with at most `terms` terms. Raises InvalidValue without steps.
        """
        if terms < 1:
            raise InvalidValue(f"{terms=} must be at least 1", "terms")
        steps = [(load, seconds) for load, seconds in measured if seconds > 0]
        if not steps:
            raise InvalidValue("no measured steps to fit", "measured")
        seconds = np.array([time for _, time in steps])
        table = np.array([(load.tokens, load.drafts, 1.0) for load, _ in steps])
        read = np.array([[load.context + load.prefix] for load, _ in steps]) * float(context)
        tokens = np.array([load.tokens for load, _ in steps])
        starts = [np.zeros(len(steps), dtype=np.intp)]  # a single term: the result is never worse than linear
        starts += [np.digitize(tokens, np.quantile(tokens, _cuts(split, terms))) for split in SPLITS if terms > 1]
        best = min((_alternate(table, read, seconds, start) for start in starts), key=lambda attempt: attempt[0])
        return cls(tuple(Term(*row) for row in best[1].tolist()), best[2])


def _cuts(split: float, terms: int) -> Sequence[float]:
    """Return the quantiles that cut tokens into `terms` groups: the first at `split`, the others evenly above it."""
    return [split + (1 - split) * k / (terms - 1) for k in range(terms - 1)] if terms > 1 else []


def _alternate(table: Array, read: Array, seconds: Array, owner: Owner) -> tuple[float, Array, float]:
    """Alternate from an initial assignment of steps to terms.

    Returns the squared logarithmic error, the terms as rows of (k1, k2, b), and the context coefficient.
    """
    terms = int(owner.max()) + 1
    best: tuple[float, Array, float] = (float("inf"), np.zeros((terms, 3)), 0.0)
    for _ in range(ROUNDS):
        parts = [table * (owner == term)[:, None] for term in range(terms)]
        solution = proportional(np.hstack([*parts, read]), seconds)
        rows, context = solution[:-1].reshape(terms, 3), float(solution[-1])
        times = table @ rows.T
        error = log_error(times.max(axis=1) + read[:, 0] * context, seconds)
        if error < best[0]:
            best = (error, rows, context)
        slowest = times.argmax(axis=1)
        if np.array_equal(slowest, owner):
            break
        owner = slowest
    return best
