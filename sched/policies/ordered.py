"""Base of the prompt orders: best effort last, a share of the time for long prompts, packing."""

from __future__ import annotations

import numpy as np

from ..api.errors import InvalidValue
from ..api.policy import Decision, Order, QueueView, View, in_order

LONG = 65536  # tokens: prompts of this length starve under load in every order by size or feasibility
PERIOD = 10.0  # seconds; the oldest long prompt goes first in a share `ageing` of each period


class Ordered:
    """A policy that grants the rest of each prompt, in an order. The step is cut from the front of that order.

    ageing: share of the time (0 to 1) in which the oldest prompt of 64K tokens or more goes first, so
        that it does not starve. A step that starts in this time may end after it.
    pack: whether a step may hold several prompts.
    """

    def __init__(self, ageing: float = 0.0, pack: bool = True) -> None:
        self._ageing = checked_share(ageing)
        self._pack = pack

    def order(self, view: View) -> Order:
        """Order all rows of `view.prefill`, the one to serve first in front."""
        raise NotImplementedError

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision()
        order = aged(view.prefill, self.order(view), view.start, self._ageing)
        grants = in_order(view.prefill, order, view.limits)
        return Decision(grants) if self._pack else Decision(grants, prompts=1)


def checked_share(ageing: float) -> float:
    if not 0 <= ageing <= 1:
        raise InvalidValue(f"ageing={ageing!r} must be a share of the time, 0 to 1", "policy")
    return ageing


def sort(rows: QueueView, *keys: np.ndarray) -> Order:
    """Sort rows by keys, the most significant key first. Best effort is last; ties go by arrival and id."""
    order: Order = np.lexsort((*reversed(keys), rows.best_effort))
    return order


def longs_turn(start: float, share: float) -> bool:
    """Return whether `start` lies in the time reserved for long prompts."""
    return start % PERIOD < share * PERIOD


def aged(rows: QueueView, order: Order, start: float, share: float) -> Order:
    """Move the oldest long prompt to the front in `share` of the time."""
    if not longs_turn(start, share):
        return order
    long = (rows.length >= LONG) & (rows.best_effort == 0)
    if not long.any():
        return order
    oldest = int(np.argmax(long))  # rows are by arrival
    return np.concatenate(([oldest], order[order != oldest]))
