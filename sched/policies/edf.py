"""Earliest deadline first, blind to what can still be met, or to what cannot only once it is missed."""

from __future__ import annotations

from ..api.policy import Order, View
from .ordered import Ordered, sort


class Edf(Ordered):
    """By arrival + TTFT. In overload everybody waits for those who are late already."""

    def order(self, view: View) -> Order:
        return sort(view.prefill, view.prefill.deadline)


class DeadlineEdf(Ordered):
    """D-EDF of the FlowPrefill paper (section 6.3): as EDF, with those whose deadline has passed
    behind the others."""

    def order(self, view: View) -> Order:
        deadline = view.prefill.deadline
        return sort(view.prefill, deadline < view.start, deadline)
