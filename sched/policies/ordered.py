"""What the prompt orders have in common: best effort last, a share of the time for long prompts, packing."""

from __future__ import annotations

import numpy as np

from ..api.errors import InvalidValue
from ..api.policy import Decision, Order, QueueView, View, in_order

LONG = 65536  # tokens: prompts that every order by size or by feasibility starves under load
PERIOD = 10.0  # seconds, of which `ageing` is the share of the oldest long prompt


class Ordered:
    """Grants all that is left of each prompt, in an order; what a step holds is cut from its front.

    ageing: share of the time (0 to 1) in which the oldest prompt of 64K tokens and more goes first, so that it does
    not starve; a step begun in that time may end after it. pack: whether a step may hold several prompts.
    """

    def __init__(self, ageing: float = 0.0, pack: bool = True) -> None:
        self._ageing = checked_share(ageing)
        self._pack = pack

    def order(self, view: View) -> Order:
        """All rows of `view.prefill`, the first to be served first."""
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
    """Rows by the keys, the first of which counts most; best effort last, ties by arrival and id."""
    order: Order = np.lexsort((*reversed(keys), rows.best_effort))
    return order


def longs_turn(start: float, share: float) -> bool:
    """Whether `start` lies in the time of long prompts."""
    return start % PERIOD < share * PERIOD


def aged(rows: QueueView, order: Order, start: float, share: float) -> Order:
    """The oldest long prompt to the front, in `share` of the time."""
    if not longs_turn(start, share):
        return order
    long = (rows.length >= LONG) & (rows.best_effort == 0)
    if not long.any():
        return order
    oldest = int(np.argmax(long))  # rows are by arrival
    return np.concatenate(([oldest], order[order != oldest]))
