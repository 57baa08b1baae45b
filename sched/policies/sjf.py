"""Shortest job first: the prompt with the least remaining work."""

from __future__ import annotations

from ..api.policy import Order, View
from ..feasibility import remaining_work
from .ordered import Ordered, sort


class Sjf(Ordered):
    """The order by remaining work. Long prompts starve under load (Kairos, arXiv 2605.02329, section 3.1)."""

    def order(self, view: View) -> Order:
        return sort(view.prefill, remaining_work(view, view.prefill))
