"""Kairos, slack-guided adaptive decoding (arXiv 2605.02329, Algorithm 3), repaired as the digest says."""

from __future__ import annotations

import numpy as np

from ..perf.model import Array
from ..policy import Decision, Grant, Order, View


class KairosDecode:
    """Decodes the shortest rows alone while the slack of those left out allows it.

    Repairs: the slack of a row counts the step that would serve everybody, not a step of its own (line 5); only
    rows that such a step still serves in time can forbid it (line 7), but a late row waits at most `patience` of
    its tpot; of all prefixes that fit, the one with the most tokens per second is taken, not the first local maximum
    (line 13), which noise in a measured table makes of any batch; nobody is left out while requests wait for KV,
    since that delays the release of KV.
    """

    def __init__(self, patience: float = 4.0, pressure: float = 0.8) -> None:
        self._patience = patience
        self._pressure = pressure  # share of pages in use above which everything is decoded

    def decide(self, view: View) -> Decision:
        rows = view.decode
        order = np.argsort(rows.context, kind="stable")
        count = len(order) if self._short_of_kv(view) else self._prefix(view, order)
        if count == len(order):
            return Decision(tuple(Grant(request.id, 1) for request in rows))
        return Decision(tuple(Grant(rows[row].id, 1) for row in order[:count].tolist()))

    def _short_of_kv(self, view: View) -> bool:
        return view.kv_waiting > 0 or view.free_pages < (1.0 - self._pressure) * view.limits.pages

    def _prefix(self, view: View, order: Order) -> int:
        """How many of the shortest rows to decode: all where there is no slack to use."""
        rows = view.decode
        context: Array = rows.context[order]
        size = np.arange(1.0, len(order) + 1.0)
        seconds = view.perf.decode_times(size, context, np.cumsum(context))
        slack = rows.deadline - view.start - seconds[-1]
        if self._starved(view, slack):
            return len(order)
        in_time = slack[slack >= 0]
        if not len(in_time):
            return len(order)
        rate = np.where(seconds <= in_time.min(), size / seconds, 0.0)
        best = int(np.argmax(rate))
        return best + 1 if rate[best] > 0 else len(order)

    def _starved(self, view: View, slack: Array) -> bool:
        for row in np.flatnonzero(slack < 0).tolist():
            last = view.decode[row].last_token_at
            if last is not None and view.start - last > self._patience * view.decode.tpot[row]:
                return True
        return False
