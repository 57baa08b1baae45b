"""Continuous batching: every request that can decode does. The decode half of DistServe."""

from __future__ import annotations

from ..api.policy import Decision, View, one_each


class Continuous:
    """A decode policy that grants every row one token."""

    def decide(self, view: View) -> Decision:
        return Decision(one_each(view.decode))
