"""Slack-aware earliest deadline first, the order of the FlowPrefill paper (Equation 3), read as a tuple."""

from __future__ import annotations

from ..api.policy import Order, View
from ..feasibility import remaining_work
from .ordered import Ordered, sort


class Sedf(Ordered):
    """Those that can still be on time by deadline, then those that cannot, by deadline.

    A prompt can be where the predicted time of its own remaining work, alone and at once, ends before its deadline.
    The paper's sgn(slack)/deadline would put the latest deadline first among the late.
    """

    def order(self, view: View) -> Order:
        rows = view.prefill
        return sort(rows, view.start + remaining_work(view, rows) > rows.deadline, rows.deadline)
