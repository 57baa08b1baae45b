"""Shortest job first: the prompt with the least own work left."""

from __future__ import annotations

from ..api.policy import Order, View
from ..feasibility import remaining_work
from .ordered import Ordered, sort


class Sjf(Ordered):
    """Starves long prompts under load, as the Kairos paper says of it (arXiv 2605.02329, section 3.1)."""

    def order(self, view: View) -> Order:
        return sort(view.prefill, remaining_work(view, view.prefill))
