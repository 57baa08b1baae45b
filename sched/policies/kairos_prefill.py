"""Kairos, urgency-based prefill (arXiv 2605.02329, Algorithms 1 and 2), repaired as the digest says."""

from __future__ import annotations

import numpy as np

from ..policy import Decision, View, in_order


class KairosPrefill:
    """Orders prompts by normalised urgency: feasible and short first.

    Finish times are predicted under FCFS (Algorithm 2) with the measured prefill throughput. Line 8 divides the
    relative slack by the prompt's length; for a negative slack that would put the longest late prompt first, so
    there it multiplies. A chunk may hold several prompts. Prompts of 64K and more starve under load, whatever
    the paper's section 3.1 says.
    """

    def decide(self, view: View) -> Decision:
        rows = view.prefill
        finish = view.start + np.cumsum(rows.remaining) / view.perf.prefill_rate  # Algorithm 2, over rows by arrival
        with np.errstate(invalid="ignore"):
            urgency = (rows.deadline - finish) / rows.ttft  # Equation 1
        urgency = np.where(urgency >= 0, urgency / rows.length, urgency * rows.length)
        urgency[~np.isfinite(rows.ttft)] = -np.inf  # no objective: after everybody
        return Decision(in_order(rows, np.argsort(-urgency, kind="stable"), view.limits))
