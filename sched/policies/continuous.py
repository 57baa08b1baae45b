"""Continuous batching: every request that can decode does. The decode half of DistServe."""

from __future__ import annotations

from ..api.policy import Decision, View, one_each


class Continuous:
    def decide(self, view: View) -> Decision:
        return Decision(one_each(view.decode))
