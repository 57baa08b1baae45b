"""Slack-aware earliest deadline first: the order of the FlowPrefill paper (Equation 3), read as a tuple."""

from __future__ import annotations

from ..api.policy import Order, View
from ..feasibility import remaining_work
from .ordered import Ordered, sort


class Sedf(Ordered):
    """The order with prompts that can still be on time first, by deadline within both groups.

    A prompt can be on time if its remaining work, started now and alone, ends before its deadline. The
    paper's sgn(slack)/deadline would put the latest deadline first among late prompts.
    """

    def order(self, view: View) -> Order:
        rows = view.prefill
        return sort(rows, view.start + remaining_work(view, rows) > rows.deadline, rows.deadline)
