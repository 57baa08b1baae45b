"""Policies of the parity tests."""

from __future__ import annotations

from jaxserve.sched.api.policy import Decision, Grant, View

DRAFT = 4  # most tokens


class Longest:
    """Drafts as much as it may."""

    def decide(self, view: View) -> Decision:
        rows = tuple(Grant(one.id, 1, DRAFT) for one in view.decode)
        return Decision((*rows, *(Grant(one.id, one.remaining) for one in view.prefill)))
