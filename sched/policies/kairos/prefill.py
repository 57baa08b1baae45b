"""Kairos, urgency-based prefill (arXiv 2605.02329, Algorithms 1 and 2): repaired, or as written."""

from __future__ import annotations

import numpy as np

from ...api.perf import Array, Load
from ...api.policy import Order, View
from ...feasibility import remaining_work
from ...perf.online import running_rate
from ..ordered import Ordered, sort


class KairosPrefill(Ordered):
    """Orders prompts by normalised urgency: feasible and short first.

    Finish times are predicted under FCFS (Algorithm 2) with the measured prefill throughput. Line 8 divides the
    relative slack by the prompt's length; for a negative slack that would put the longest late prompt first, so
    there it multiplies. A chunk is cut from the front of the order, [done : done + C - used] of the last prompt that
    has room, where lines 13 to 18 compare whole prompts and shrink C for good. Prompts of 64K and more starve
    under load, whatever the paper's section 3.1 says: see `ageing`.

    ageing, pack: see Ordered. quadratic: finish times from the step-time model, not from n/mu. literal: line 8 as
    written. verbatim: line 22 too: mu counts the whole prompt for every chunk of it, which keeps slack positive.
    """

    def __init__(
        self,
        literal: bool = False,
        verbatim: bool = False,
        pack: bool = True,
        ageing: float = 0.0,
        quadratic: bool = False,
    ) -> None:
        super().__init__(ageing, pack)
        self._literal = literal or verbatim
        self._mu = _WholePrompts() if verbatim else None
        self._quadratic = quadratic

    def order(self, view: View) -> Order:
        rows = view.prefill
        finish = view.start + np.cumsum(self._durations(view))  # Algorithm 2, over rows by arrival
        with np.errstate(invalid="ignore"):
            urgency = (rows.deadline - finish) / rows.ttft  # Equation 1
        normalised = urgency / rows.length
        if not self._literal:
            normalised = np.where(urgency >= 0, normalised, urgency * rows.length)
        normalised[~np.isfinite(rows.ttft)] = -np.inf  # no objective: after everybody
        order = sort(rows, -normalised)
        if self._mu is not None:
            self._mu.note(view, order)
        return order

    def _durations(self, view: View) -> Array:
        rows = view.prefill
        if self._quadratic:
            return remaining_work(view, rows)
        rate = view.perf.prefill_rate if self._mu is None else self._mu.rate(view)
        durations: Array = (rows.remaining - rows.hit) / rate
        return durations


class _WholePrompts:
    """The throughput of line 22: lengths of the prompts in a chunk, though it holds a part of them, over its time.

    Its time is the predicted one, which is corrected by what is measured. Writer: the policy that holds it.
    """

    def __init__(self) -> None:
        self._rate: float | None = None

    def rate(self, view: View) -> float:
        return view.perf.prefill_rate if self._rate is None else self._rate

    def note(self, view: View, order: Order) -> None:
        """Of the chunk that is cut from the front of this order."""
        load, whole = Load(), 0
        for row in order.tolist():
            request = view.prefill[row]
            tokens = min(request.remaining, view.limits.tokens - load.prefill)
            if tokens <= 0:
                break
            load, whole = load.add_chunk(tokens, request.context), whole + request.prompt_length
        seconds = view.perf.step_time(load)
        if whole and seconds > 0:
            self._rate = running_rate(self.rate(view), whole, seconds)
