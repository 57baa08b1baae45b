"""Continuous batching: everything that can decode does, the decode half of DistServe."""

from __future__ import annotations

from ..policy import Decision, Grant, View


class Continuous:
    def decide(self, view: View) -> Decision:
        return Decision(tuple(Grant(request.id, 1) for request in view.decode))
