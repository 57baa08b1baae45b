"""First come, first served, in chunks. The prefill half of DistServe."""

from __future__ import annotations

import numpy as np

from ..api.policy import Decision, View, in_order


class Fcfs:
    """The order by arrival."""

    def decide(self, view: View) -> Decision:
        return Decision(in_order(view.prefill, np.arange(len(view.prefill)), view.limits))
