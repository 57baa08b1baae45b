"""The policy that takes from each paper what holds up: on-time sets, shedding, guests, preemption.

Prompts: the largest set that can be on time (feasibility.on_time_set over own remaining work), by deadline; then
those that lost their place in it, then the hopeless, each by remaining work; best effort last. Prompts that cannot be
on time never share a step with those that can, and stop at the next segment boundary when one of these comes.
Decoding: everything while the joint step keeps the tightest tpot; beyond that the longest wait (see `shed`). On decode
and mixed instances prompts are guests of a step that keeps every row in time.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from ..feasibility import Mask, decode_load, largest_chunk, mixed_bound, on_time_set, remaining_work, tightest_tpot
from ..perf.model import Array, Load
from ..policy import Decision, Grant, Order, Role, Rows, Task, View, one_each
from ..request import BEST_EFFORT, RequestView, State

CYCLE = 20.0  # seconds over which `ageing` is shared out
GAP = 0.45  # of the tbt: who joins waits for the running step and for its own
LONG = 65536  # tokens: prompts that an on-time set by count drops first


class Unified:
    """share, stretch, cushion: see feasibility.mixed_bound. keep: share of the prompts of 64K tokens and more that
    never lose their place in the on-time set to shorter ones (0 to 1). ageing: share of the time in which prompts that
    cannot be on time go first, oldest first, so that they do not starve. margin: of the tpot, for a joint decode
    step. patience: a row left out decodes again after so many tpot."""

    def __init__(
        self,
        share: float = 0.8,
        stretch: float = 1.5,
        cushion: float = 0.75,
        keep: float = 0.0,
        ageing: float = 0.02,
        margin: float = 0.97,
        patience: float = 4.0,
        preempt: bool = True,
    ) -> None:
        self._share = share
        self._stretch = stretch
        self._cushion = cushion
        self._keep = keep
        self._ageing = ageing
        self._margin = margin
        self._patience = patience
        self._preempt = preempt

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision(preempt=self._preempt and self._stops(view, view.running))
        on_time, order, hopeless = self._order(view)
        if view.role is Role.PREFILL or not len(view.decode):
            decision = self._prompts(view, on_time, order)
        elif on_time:
            decision = Decision(self._mixed(view, order[:on_time]))
        else:
            decode = self._shed(view)
            decision = Decision(decode + self._guests(view, decode_load(view.decode), order))
        return replace(decision, demote=hopeless)

    # prompts

    def _prompts(self, view: View, on_time: int, order: Order) -> Decision:
        rows = view.prefill
        aged = view.now % CYCLE < self._ageing * CYCLE
        if view.suspended and (aged or not on_time):
            return Decision(resume=view.suspended[0].step)
        count = on_time or len(order)
        if aged and on_time < len(order):
            late, count = order[on_time:], len(order) - on_time
            order = np.concatenate([late[np.argsort(rows.arrival[late], kind="stable")], order[:on_time]])
        count = min(count, view.limits.rows)
        named = order[:count]
        if not rows.running[named].any():  # those who hold pages go on where nobody of these gets any
            behind = order[count:]
            named = np.concatenate([named, behind[rows.running[behind] > 0]])
        left = rows.remaining[named].astype(int).tolist()
        grants = tuple(Grant(rows[row].id, tokens) for row, tokens in zip(named.tolist(), left, strict=True))
        return Decision(grants + one_each(view.decode), prompts=max(1, count))

    def _order(self, view: View) -> tuple[int, Order, tuple[int, ...]]:
        """How many can be on time; all rows, these first; and the requests that cannot be on time any more."""
        rows = view.prefill
        if not len(rows):
            return 0, np.arange(0), ()
        work = remaining_work(view, rows)
        deadline = np.where(rows.best_effort > 0, -inf, rows.deadline)
        chosen = on_time_set(view.start, deadline, work, self._kept(rows))
        hopeless = view.start + work > deadline
        rank = np.where(chosen, 0, np.where(rows.best_effort > 0, 3, np.where(hopeless, 2, 1)))
        order = np.lexsort((np.where(chosen, deadline, work), rank))
        lost = np.flatnonzero(hopeless & (rows.best_effort == 0)).tolist()
        return int(chosen.sum()), order, tuple(rows[row].id for row in lost if not rows[row].generated)

    def _kept(self, rows: Rows) -> Mask:
        kept: Mask = rows.length >= LONG
        for row in np.flatnonzero(kept).tolist():
            kept[row] = _draw(rows[row].id) < self._keep
        return kept

    def _stops(self, view: View, running: Task) -> bool:
        """Somebody can be on time only if what runs, which cannot be, makes way."""
        if len(view.suspended) + 1 >= view.limits.suspended:
            return False
        due = max((one.arrival + one.slo.ttft for one in running.requests if one.tier != BEST_EFFORT), default=-inf)
        if view.now + running.seconds <= due:
            return False
        return self._order(view)[0] > 0

    # decoding

    def _shed(self, view: View) -> tuple[Grant, ...]:
        """Everybody, or all but the longest where the joint step would not keep the tightest tpot."""
        rows = view.decode
        count, context = len(rows), rows.context
        limit = self._margin * tightest_tpot(rows)
        if view.kv_waiting or view.perf.step_time(decode_load(rows)) <= limit:
            return one_each(rows)
        order = np.argsort(context, kind="stable")
        sorted_: Array = context[order]
        seconds = view.perf.decode_times(np.arange(1.0, count + 1.0), sorted_, np.cumsum(sorted_))
        fits = max(1, int(np.searchsorted(seconds, limit, side="right")))
        chosen = set(order[:fits].tolist())
        for row in order[fits:].tolist():
            if _waited(view, rows[row], self._patience * rows.tpot[row], limit):
                return one_each(rows)
        return tuple(Grant(rows[row].id, 1) for row in sorted(chosen))

    def _mixed(self, view: View, order: Order) -> tuple[Grant, ...]:
        """Prompts that can be on time are here: only rows that cannot skip the step decode for sure."""
        rows, bound = view.decode, self._bound(view)
        tpot = np.where(np.isfinite(rows.tpot), rows.tpot, 0.05)
        urgent = (rows.best_effort == 0) & (rows.deadline - view.start < bound + (1.0 + self._cushion) * tpot)
        spared = np.flatnonzero(~urgent)
        for row, wait in zip(spared.tolist(), (self._patience * tpot[spared]).tolist(), strict=True):
            urgent[row] = _waited(view, rows[row], wait, bound)
        context: Array = rows.context
        load = Load()
        if urgent.any():
            load = Load(
                decode=int(urgent.sum()), longest=int(context[urgent].max()), context=int(context[urgent].sum())
            )
        guests = self._guests(view, load, order, bound)
        requests = {request.id: request for request in (view.prefill[row] for row in order.tolist())}
        for grant in guests:
            load = load.add_chunk(grant.tokens, requests[grant.request].context)
        others = np.flatnonzero(~urgent)
        chosen = [rows[row].id for row in np.flatnonzero(urgent).tolist()]
        for row in others[np.argsort(context[others], kind="stable")].tolist():
            more = load.add_decode(int(context[row]))
            if view.perf.step_time(more) > bound:
                break
            load = more
            chosen.append(rows[row].id)
        if not chosen and all(requests[grant.request].state is State.WAITING for grant in guests):
            chosen.append(rows[0].id)  # they may get no pages
        return tuple(Grant(id, 1) for id in chosen) + guests

    def _bound(self, view: View) -> float:
        """Where prompts are no guests (mixed instances) decoding that is too slow by itself must not shut them out."""
        bound = mixed_bound(view, self._share, self._stretch, self._cushion, GAP)
        alone = view.perf.step_time(decode_load(view.decode)) if view.role is Role.MIXED else 0.0
        return max(bound, 1.5 * alone)

    def _guests(self, view: View, load: Load, order: Order, bound: float | None = None) -> tuple[Grant, ...]:
        """Chunks of prompts, in an order of rows, beside a step of `load`; the first that waits and finds no slot or
        no pages ends it: time set aside for it would be lost."""
        rows, cut = view.prefill, []
        bound = self._bound(view) if bound is None else bound
        slots = view.limits.rows - len(view.decode) - int(rows.running.sum())
        pages = view.free_pages
        for row in order.tolist():
            request = rows[row]
            if request.state is State.WAITING:
                slots -= 1
                pages -= -(-request.remaining // view.limits.page_size)
                if (slots < 0 or pages < 0) and not view.decode.best_effort.any():
                    break
            tokens = largest_chunk(view.perf, load, request.context, request.remaining, bound)
            if not tokens:
                break
            cut.append(Grant(request.id, tokens))
            load = load.add_chunk(tokens, request.context)
        return tuple(cut)


def _waited(view: View, request: RequestView, most: float, seconds: float) -> bool:
    """Whether a row cannot skip a step of so many seconds: it has waited as long as it may, or else breaks its tbt."""
    last = request.last_token_at
    if last is None or view.start - last >= most:
        return True
    return request.slo.tbt is not None and view.start + 2.0 * seconds - last > request.slo.tbt


def _draw(id: int) -> float:
    """A number in [0, 1) that depends on the request alone."""
    return (id * 0x9E3779B97F4A7C15 % (1 << 64)) / (1 << 64)
