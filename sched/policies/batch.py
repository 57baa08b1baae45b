"""A step filled with decodes and prompt chunks up to a bound, shared by the policies for colocated instances."""

from __future__ import annotations

import numpy as np

from ..api.perf import Array, Load
from ..api.policy import Decision, Grant, Order, View, one_each
from ..api.request import State
from ..feasibility import Cost, fitting, held_by_best_effort, joined, largest_chunk, tightest_pace


def admissible(view: View, order: Order) -> tuple[Order, Order]:
    """Split `order` into prompts that can be computed now and prompts that wait for pages or a slot.

    The first waiting prompt that does not fit blocks all waiting prompts behind it. Prefix hits are not
    counted, so a prompt of the second group may still fit. Batches charge the first group before it,
    because those prompts are sure to run.
    """
    rows, limits = view.prefill, view.limits
    waits = (rows.running == 0)[order]
    need = np.ceil((rows.context + rows.remaining) / limits.page_size)[order]
    waiting = np.add.accumulate(waits, dtype=np.intp)
    free_pages: Array | float = view.free_pages - len(view.decode)
    free_slots: Array | float = view.free_slots
    pages, slots = held_by_best_effort(view, np.floor)
    if slots:
        best = order >= rows.standard
        free_pages, free_slots = free_pages + np.where(best, 0.0, pages), free_slots + np.where(best, 0.0, slots)
    late = waits & ((np.add.accumulate(waits * need) > free_pages) | (waiting > free_slots))
    return order[~late], order[late][: limits.rows]


def first_come(view: View) -> Order:
    """Order prompts by arrival: best effort last, and prompts in progress first within each group."""
    rows = view.prefill
    return np.argsort(2.0 * rows.best_effort - rows.running, kind="stable")


def stall_free_tokens(view: View, share: float = 1.0) -> int:
    """Return the token budget that a profile of the model would set.

    It is the largest step of prompt tokens alone that takes at most `share` of the tightest TPOT or TBT of
    all requests on the instance. Returns `limits.tokens` if no request has one, or if even one token
    takes longer than that.
    """
    bound = share * min(tightest_pace(view.decode), tightest_pace(view.prefill))
    return largest_chunk(view.perf.step_time, Load(), 0, view.limits.tokens, bound, grid=1) or view.limits.tokens


class Batch:
    """The grants of one step, most important first.

    Grants are added until `cost` would exceed `bound` or the step has no room for more tokens. Once
    something had to be cut, everything after it is left out.
    """

    def __init__(self, view: View, cost: Cost, bound: float) -> None:
        self._view = view
        self._cost = cost
        self._bound = bound
        self._most = view.limits.tokens
        self._prompts = view.limits.prompts
        self._grants: list[Grant] = []
        self._runs = False  # whether some grant can run without getting pages or a slot first
        self.load = Load()
        self.full = False

    def __len__(self) -> int:
        return len(self._grants)

    def decode(self, order: Order, *, always: bool = False) -> None:
        """Grant one token to each of these rows of `view.decode`: as many as fit, or all if `always`."""
        if (self.full and not always) or not len(order):
            return
        rows, count = self._view.decode, len(order)
        context = rows.context[order]
        if not always:
            count = fitting(self._cost, self.load, context[: max(0, self._most - self.load.tokens)], self._bound)
            self.full = count < len(order)
        if count:
            self._grants += one_each([rows[row] for row in order[:count].tolist()])
            self.load = joined(self.load, context[:count])
            self._runs = True

    def prompts(self, order: Order, *, whole: bool = False) -> None:
        """Grant chunks of these rows of `view.prefill`, the last one cut to fit.

        whole: only cut a prompt if it is the first grant of the step.
        """
        rows = self._view.prefill
        for row in order.tolist():
            room = self._most - self.load.tokens
            if self.full or room < 1 or self._prompts < 1:
                return
            request = rows[row]
            left, done = request.remaining, request.context
            tokens = self._chunk(min(left, room), done)
            self.full = tokens < left
            if not tokens or (whole and self.full and self._grants):
                self.full = True
                return
            self._grants.append(Grant(request.id, tokens))
            self.load = self.load.add_chunk(tokens, done)
            self._prompts -= 1
            self._runs = self._runs or request.state is not State.WAITING

    def _chunk(self, most: int, done: int) -> int:
        return largest_chunk(self._cost, self.load, done, most, self._bound, grid=1)

    def decision(self, urgent: Order) -> Decision:
        """Return the grants as a decision.

        If every grant must first get pages and a slot, one request that already has them is added, so
        that the instance never idles: the first row of `urgent` (rows of `view.decode`), or else a prompt
        in progress, which takes the place of a prompt that gets no pages.
        """
        grants, rows = tuple(self._grants), self._view.prefill
        if self._runs:
            return Decision(grants)
        if len(urgent):
            return Decision((*grants, Grant(self._view.decode[int(urgent[0])].id, 1)))
        prompts = self._view.limits.prompts - self._prompts
        for row in np.flatnonzero(rows.running > 0)[:1].tolist():
            request = rows[row]
            self.load = Load()
            tokens = self._chunk(min(request.remaining, self._most), request.context)
            grants = (*grants, Grant(request.id, max(1, tokens)))
        return Decision(grants, prompts=max(1, prompts))
