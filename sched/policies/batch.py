"""Filling one step with decoding rows and prompts up to a bound: what the policies for colocated instances share."""

from __future__ import annotations

import numpy as np

from ..api.perf import Array, Load
from ..api.policy import Decision, Grant, Order, View, one_each
from ..api.request import State
from ..feasibility import Cost, fitting, held_by_best_effort, joined, largest_chunk, tightest_tpot


def admissible(view: View, order: Order) -> tuple[Order, Order]:
    """Prompts of `order` that can be computed now, and those that wait for pages or a slot.

    The first that does not fit keeps back all that wait behind it. Prefix hits are not known here, so a prompt of the
    second kind may yet fit; it had better not be charged for before those of the first, which surely run.
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
    """Prompts by arrival, those begun first, best effort last."""
    rows = view.prefill
    return np.argsort(2.0 * rows.best_effort - rows.running, kind="stable")


def stall_free_tokens(view: View, share: float = 1.0) -> int:
    """The token budget that a profile of the model would set: the largest step of prompt tokens alone that takes no
    longer than `share` of the tightest tpot of all requests here; limits.tokens where none has one, or where not even
    one token is that fast, so that no budget keeps it."""
    bound = share * min(tightest_tpot(view.decode), tightest_tpot(view.prefill))
    return largest_chunk(view.perf.step_time, Load(), 0, view.limits.tokens, bound, grid=1) or view.limits.tokens


class Batch:
    """Grants for one step, most important first, until `cost` would exceed `bound` or the step has no room for more
    tokens. What comes after something that had to be cut is left out."""

    def __init__(self, view: View, cost: Cost, bound: float) -> None:
        self._view = view
        self._cost = cost
        self._bound = bound
        self._most = view.limits.tokens
        self._prompts = view.limits.prompts
        self._grants: list[Grant] = []
        self._runs = False  # something is granted that needs nothing more to run
        self.load = Load()
        self.full = False

    def __len__(self) -> int:
        return len(self._grants)

    def decode(self, order: Order, *, always: bool = False) -> None:
        """One token each of these rows of view.decode, as many as fit, or all of them."""
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
        """Chunks of these rows of view.prefill; the last is cut to fit. `whole`: a prompt is only cut where it is the
        first of the step."""
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
        """The most tokens of a prompt with `done` tokens computed that keep the step within its bound."""
        return largest_chunk(self._cost, self.load, done, most, self._bound, grid=1)

    def decision(self, urgent: Order) -> Decision:
        """What was put in. Where all of it must first find pages and a slot, somebody who has them comes along, so that
        the instance never idles: the first of the decoding rows `urgent`, or else a prompt that has begun, which has
        the place of one that gets none."""
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
