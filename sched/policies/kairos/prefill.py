"""Kairos urgency-based prefill (arXiv 2605.02329, Algorithms 1 and 2), repaired or as written."""

from __future__ import annotations

import numpy as np

from ...api.perf import Array, Load
from ...api.policy import Order, View
from ...feasibility import remaining_work
from ...perf.online import running_rate
from ..ordered import Ordered, sort


class KairosPrefill(Ordered):
    """The order by normalized urgency: feasible and short prompts first.

    Finish times are predicted under FCFS (Algorithm 2) with the measured prefill throughput. Line 8
    divides relative slack by prompt length. For negative slack that would put the longest late prompt
    first, so there it multiplies. A chunk is cut from the front of the order, and the last prompt gets
    [done : done + C - used]; as written, lines 13 to 18 compare whole prompts and shrink C for good.
    Prompts of 64K tokens and more starve under load, contrary to section 3.1 of the paper: see `ageing`.

    literal: line 8 as written. verbatim: line 22 as written, too: mu counts the whole prompt for each of
        its chunks, which keeps slack positive.
    pack, ageing: see `Ordered`.
    quadratic: predict finish times with the step-time model instead of n/mu.
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
        normalized = urgency / rows.length
        if not self._literal:
            normalized = np.where(urgency >= 0, normalized, urgency * rows.length)
        normalized[~np.isfinite(rows.ttft)] = -np.inf  # prompts without an objective are last
        order = sort(rows, -normalized)
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
    """The throughput of line 22 as written: whole prompt lengths over the time of a chunk that holds parts of them.

    The time is the predicted one, which is corrected by measurements. Writer: the policy that holds it.
    """

    def __init__(self) -> None:
        self._rate: float | None = None

    def rate(self, view: View) -> float:
        return view.perf.prefill_rate if self._rate is None else self._rate

    def note(self, view: View, order: Order) -> None:
        """Update the throughput with the chunk that is cut from the front of this order."""
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
