"""Kairos slack-guided adaptive decoding (arXiv 2605.02329, Algorithm 3), repaired or as written."""

from __future__ import annotations

import numpy as np

from ...api.perf import Array
from ...api.policy import Decision, Grant, Order, View
from ...feasibility import keeps_objectives, starved


class KairosDecode:
    """A decode policy that runs only the shortest rows while the slack of the others allows it.

    Repairs of the algorithm as written:

    - Line 5: slack is computed with the step that would decode all rows, not with a step per row.
    - Line 7: only rows that the joint step still serves in time can veto leaving rows out. A late row
      waits at most `patience` TPOT.
    - Line 13: takes the prefix with the most tokens per second, not the first local maximum, since noise
      in a measured table makes almost any batch one.
    - No row is left out while requests wait for KV or a slot, since that delays the release of both.

    Best effort is last and vetoes nothing. No row is left out if no row can keep its objectives, or for
    longer than `feasibility.starved` allows.

    literal: Algorithm 3 as written. verbatim: the same here.
    patience: in TPOT. pressure: share of pages in use above which all rows decode.
    margin: share by which predicted steps are lengthened. greedy: take the first local maximum.
    """

    def __init__(
        self,
        literal: bool = False,
        verbatim: bool = False,
        patience: float = 4.0,
        pressure: float = 0.8,
        margin: float = 0.0,
        greedy: bool = False,
    ) -> None:
        self._literal = literal or verbatim
        self._patience = patience
        self._pressure = pressure
        self._stretch = 1.0 + margin
        self._greedy = greedy or self._literal

    def decide(self, view: View) -> Decision:
        rows = view.decode
        order: Order = np.lexsort((rows.context, rows.best_effort))
        count = len(order) if self._short_of_room(view) else self._prefix(view, order)
        if count == len(order):
            return Decision(tuple(Grant(request.id, 1) for request in rows))
        chosen, left = order[:count], order[count:]
        if not self._literal:
            chosen = np.concatenate([chosen, starved(view, left)])
        return Decision(tuple(Grant(rows[row].id, 1) for row in chosen.tolist()))

    def _short_of_room(self, view: View) -> bool:
        """Return whether leaving rows out, which delays the release of their KV and slots, would block requests."""
        if self._literal:
            return False
        if view.free_slots <= 0 and (view.prefill.running == 0).any():
            return True
        return view.kv_waiting > 0 or view.free_pages < (1.0 - self._pressure) * view.limits.pages

    def _prefix(self, view: View, order: Order) -> int:
        """Return how many of the shortest rows to decode: all if there is no slack to use."""
        context: Array = view.decode.context[order]
        size = np.arange(1.0, len(order) + 1.0)
        longest = np.maximum.accumulate(context)
        seconds = self._stretch * view.perf.decode_times(size, longest, np.cumsum(context))
        allowed = self._allowed(view, float(seconds[-1]))
        if allowed is None:
            return len(order)
        rate = np.divide(size, seconds, out=np.full(len(order), np.inf), where=seconds > 0)  # a table may predict 0 s
        rate[seconds > allowed] = 0.0
        best = int(np.argmax(rate))
        if self._greedy:  # lines 11 to 18: rows are sorted by length, so all rows behind the first one left out are out
            falls = np.flatnonzero(rate[1:] <= rate[:-1])
            best = int(falls[0]) if len(falls) else len(rate) - 1
        gains = self._literal or keeps_objectives(view.decode, view.start, float(seconds[best]))
        return best + 1 if rate[best] > 0 and gains else len(order)

    def _allowed(self, view: View, all_seconds: float) -> float | None:
        """Return the longest duration of a step that leaves rows out, or None if none may be left out."""
        rows = view.decode
        slack: Array = rows.deadline - view.start
        if self._literal:
            slack -= view.perf.decode_times(np.ones(len(rows)), rows.context, rows.context)
            return float(slack.min())
        slack -= all_seconds
        slack[rows.best_effort > 0] = np.inf
        if self._starved(view, slack):
            return None
        in_time = slack[slack >= 0]
        return float(in_time.min()) if len(in_time) else None

    def _starved(self, view: View, slack: Array) -> bool:
        for row in np.flatnonzero(slack < 0).tolist():
            last = view.decode[row].last_token_at
            if last is not None and view.start - last > self._patience * view.decode.tpot[row]:
                return True
        return False
