"""First come, first served, in chunks: the prefill half of DistServe."""

from __future__ import annotations

from itertools import islice

from ..policy import Decision, Grant, View


class Fcfs:
    def decide(self, view: View) -> Decision:
        return Decision(
            tuple(Grant(request.id, request.remaining) for request in islice(view.prefill, view.limits.rows))
        )
