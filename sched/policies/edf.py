"""Earliest deadline first, without predicting whether a deadline can still be met."""

from __future__ import annotations

from ..api.policy import Order, View
from .ordered import Ordered, sort


class Edf(Ordered):
    """The order by arrival + TTFT. Under overload late prompts delay all others."""

    def order(self, view: View) -> Order:
        return sort(view.prefill, view.prefill.deadline)


class DeadlineEdf(Ordered):
    """The order of `Edf`, except that prompts with a past deadline are last.

    This is D-EDF of the FlowPrefill paper (section 6.3).
    """

    def order(self, view: View) -> Order:
        deadline = view.prefill.deadline
        return sort(view.prefill, deadline < view.start, deadline)
