"""The policy that combines what works of each paper: on-time sets, shedding, piggybacked prefill, preemption.

Prefill: first the largest set of prompts that can be on time (`feasibility.on_time_set` over their
remaining work), by deadline. Then prompts that lost their place in it, then hopeless prompts, each by
remaining work; best effort is last. Prompts that cannot be on time never share a step with prompts that
can, and are preempted at the next segment boundary when one of these arrives. A step that is on time is
preempted if more prompts are on time that way. It also takes along prompts that would be late behind it
(`_riders`). Steps that last longer or shorter than predicted correct the model (`View.drift`).

Decode: all rows while the joint step keeps the tightest TPOT. Beyond that the longest rows wait (`_shed`).
On decode and mixed instances prompts are piggybacked on steps that keep every row on time. On mixed
instances, rows that can wait join them only while a new prompt can wait for the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from ..api.policy import Decision, Grant, Order, Role, Task, View, one_each, whole
from ..api.request import BEST_EFFORT, State
from ..feasibility import (
    BEHIND,
    MARGIN,
    NO_ROWS,
    PRESSED,
    ROUNDING,
    SHARE,
    Mask,
    deadlines,
    decode_load,
    fitting,
    joiners_bound,
    keeps_objectives,
    largest_chunk,
    late_joiners,
    left_behind,
    load_of,
    mixed_bound,
    on_time_set,
    piggyback_speed,
    promised,
    remaining_work,
    spare_time,
    tightest_pace,
    with_prompt,
)
from ..perf.scaled import Scaled
from .ordered import checked_share

STRETCH = 1.2  # of the TPOT: see feasibility.mixed_bound
GAP = 0.45  # of the TBT: a request that joins waits for the running step and for its own


class Unified:
    """On-time sets for prompts, shedding for decodes, piggybacked prefill on shared instances.

    share, stretch, cushion: see `feasibility.mixed_bound`.
    ageing: share of the time that the oldest prompt that cannot be on time gets before all others: its own
        time in each 1 / `ageing` times as long, so that it does not starve.
    patience: a row left out decodes again after this many TPOT, and one that joined late should be on time again
        within as many tokens, rounded down.
    preempt: whether running prefill steps may be preempted.
    pack: see `_together`.
    """

    def __init__(
        self,
        share: float = SHARE,
        stretch: float = STRETCH,
        cushion: float = 0.75,
        ageing: float = 0.02,
        patience: float = 4.0,
        preempt: bool = True,
        pack: float = 0.8,
    ) -> None:
        self._share = share
        self._stretch = stretch
        self._cushion = cushion
        self._ageing = checked_share(ageing)
        if not 1.0 <= patience < inf:
            raise InvalidValue(f"patience={patience!r} must be at least 1 (TPOT), and finite", "policy")
        self._patience = patience
        self._preempt = preempt
        self._pack = pack

    def decide(self, view: View) -> Decision:
        if view.drift != 1.0:  # an optimistic model would make every joint step late
            view = replace(view, perf=Scaled(view.perf, view.drift))
        if view.running is not None:
            return Decision(preempt=self._preempt and self._stops(view, view.running))
        hope = self._hope(view)
        late = late_joiners(view, int(self._patience)) if hope and view.role is Role.DECODE else NO_ROWS
        if len(late):
            return Decision(one_each(view.decode[row] for row in late.tolist()))
        longest = self._longest(view, hope)
        queue = self._queue(view, longest)
        if view.role is Role.PREFILL or not len(view.decode):
            decision = self._prompts(view, queue)
        elif (stopped := self._goes_on(view, queue)) is not None:
            decision = Decision(resume=stopped)
        elif len(queue.on_time):
            decision = Decision(self._mixed(view, queue.on_time, longest))
        else:
            decode = self._shed(view) if hope else one_each(view.decode)
            riders = self._piggyback(view, decode_load(view.decode), queue.others(), longest.mixed)
            decision = Decision(decode + riders.grants)
        return replace(decision, demote=queue.hopeless) if queue.hopeless else decision

    # prompts

    def _prompts(self, view: View, queue: _Queue) -> Decision:
        rows, on_time = view.prefill, queue.on_time
        aged = self._turn(view.now, _whole(view.suspended[0]) if view.suspended else queue.oldest)
        if queue.stopped is not None and (not len(on_time) or queue.stopped.due <= rows.deadline[on_time[0]]):
            return Decision(resume=queue.stopped.step)
        if view.suspended and (aged or not len(on_time)):
            return Decision(resume=view.suspended[0].step)
        if len(on_time) == len(rows) or (len(on_time) and not aged):
            first, behind = on_time, queue.others
        else:
            first, behind = queue.others(), lambda: on_time
            if aged:
                first = first[np.argsort(rows.arrival[first], kind="stable")]
        named = first[: self._together(view, first) if len(first) and first is on_time else view.limits.rows]
        if first is on_time and 0 < len(named) == len(on_time) < len(rows) and queue.stopped is None:
            named = np.concatenate([named, self._riders(view, on_time, queue.others())])
        count = len(named)
        # Prompts with pages go on if none of the named ones gets any. Best effort gives way to waiting prompts.
        if not (rows.running[named] * (rows.best_effort[named] == 0)).any():
            others = np.concatenate([first[count:], behind()])
            named = np.concatenate([named, others[rows.running[others] > 0]])
        return Decision(whole(rows, named) + one_each(view.decode), prompts=max(1, count))

    def _together(self, view: View, order: Order) -> int:
        """Return how many prompts, from the first by deadline on, share a step.

        All complete when the step does, which may take `pack` of the time left to the first
        deadline. Thus a step is shared if that saves time, not if it costs a deadline.
        """
        rows, load, most = view.prefill, Load(), min(len(order), view.limits.rows)
        end = view.start + self._pack * (float(rows.deadline[order[0]]) - view.start)
        for count, row in enumerate(order[:most].tolist()):
            load = with_prompt(load, rows[row], int(rows.hit[row]))
            if count and view.start + view.perf.step_time(load) > end:
                return count
        return most

    def _riders(self, view: View, on_time: Order, others: Order) -> Order:
        """Choose prompts outside the on-time set that are on time in one short step with all of the set.

        They would be late behind that step, and sharing it saves the fixed time of another.
        """
        rows, load, riders = view.prefill, Load(), []
        for row in on_time.tolist():
            load = with_prompt(load, rows[row], int(rows.hit[row]))
        left = float(rows.deadline[on_time[0]]) - view.start
        for row in others[: view.limits.rows - len(on_time)].tolist():
            longer, due = with_prompt(load, rows[row], int(rows.hit[row])), float(rows.deadline[row]) - view.start
            seconds = view.perf.step_time(longer)
            if row >= rows.standard or seconds > left:
                break  # prompts are sorted by work: those behind take longer
            if seconds <= due:
                load, left = longer, min(left, due)
                riders.append(row)
        return np.array(riders, dtype=np.intp)

    def _queue(self, view: View, longest: _Longest) -> _Queue:
        rows = view.prefill
        if not len(rows) and not view.suspended:
            return _Queue(np.arange(0), (), lambda: np.arange(0), 0.0)
        work, deadline = remaining_work(view, rows), deadlines(rows)
        hopeless = view.start + work > deadline  # late even if nothing else runs
        if longest.mixed:
            slow = work / max(ROUNDING, piggyback_speed(view, longest.mixed))
            brief = longest.brief < longest.mixed  # decodes that can wait then skip the steps of a prompt
            work = np.where(work <= longest.mixed, work, slow) if brief else slow
        jobs = [_job(view, task) for task in view.suspended]
        every = on_time_set(view.start, *_with(deadline, work, rows.weight, jobs))
        chosen, picked = every[: len(rows)], every[len(rows) :].tolist()
        on_time = np.flatnonzero(chosen)
        on_time = on_time[np.argsort(deadline[on_time], kind="stable")]

        def others() -> Order:
            rank = np.where(hopeless, 2, 1)
            rank[rows.standard :] = 2 + rows.best_effort[rows.standard :]
            left = np.flatnonzero(~chosen)
            return left[np.lexsort((work[left], rank[left]))]

        lost = np.flatnonzero(hopeless[: rows.standard]).tolist()
        stopped = min((job for job, able in zip(jobs, picked, strict=True) if able), default=None)
        late = np.flatnonzero(~chosen)
        oldest = float(work[late[rows.arrival[late].argmin()]]) if len(late) else 0.0
        hopeless_ids = tuple(rows[row].id for row in lost if not rows[row].generated)
        return _Queue(on_time, hopeless_ids, others, oldest, stopped)

    def _goes_on(self, view: View, queue: _Queue) -> int | None:
        """Return the suspended step that resumes although decodes wait for it, if any.

        As in `_prompts`, if the decodes have the time for it; in the time of `ageing` regardless.
        """
        if not view.suspended:
            return None
        first, due = view.suspended[0], view.prefill.deadline[queue.on_time[:1]]
        slack = float(np.minimum.reduce(promised(view.decode, view.decode.deadline), initial=inf)) - view.start
        stopped = queue.stopped
        if stopped is not None and stopped.seconds <= slack and not (due < stopped.due).any():
            return stopped.step
        waits = not len(due) and first.seconds <= slack
        return first.step if waits or self._turn(view.now, _whole(first)) else None

    def _turn(self, now: float, seconds: float) -> bool:
        """Return whether it is the turn of a late prompt that takes `seconds` in all: for so long in each cycle."""
        return self._ageing > 0.0 and seconds > 0.0 and now % (seconds / self._ageing) < seconds

    def _stops(self, view: View, running: Task) -> bool:
        """Return whether the running step should stop.

        It should if it cannot be on time and another prompt can, or if more prompts are on time when it
        pauses for a while.
        """
        if len(view.suspended) + 1 >= view.limits.suspended:
            return False
        job = _job(view, running)
        if view.now + job.seconds > job.due:
            return len(self._queue(view, self._longest(view, self._hope(view))).on_time) > 0
        rows = view.prefill
        if not len(rows):
            return False
        jobs = [_job(view, task) for task in view.suspended]
        queue = _with(deadlines(rows), remaining_work(view, rows), rows.weight, jobs)
        now, later = _with(*queue, [job]), queue
        stopped, whole = on_time_set(view.now, *now), on_time_set(view.now + job.seconds, *later)
        return bool(stopped[-1]) and _value(stopped, now[2]) > _value(whole, later[2]) + job.weight

    # decoding

    def _hope(self, view: View) -> bool:
        """Return whether any decode can keep its objectives.

        Considered are steps of the shortest row alone, with a step of all rows as often as `patience`
        requires. On a decode instance more rows may arrive, so a joint step that keeps the tightest TPOT
        is enough.
        """
        rows = view.decode
        pace = tightest_pace(rows)
        if not isfinite(pace):
            return True
        every = view.perf.step_time(decode_load(rows))
        if every <= MARGIN * pace:
            return view.role is Role.DECODE or keeps_objectives(rows, view.start, every)
        alone = view.perf.step_time(load_of(rows.context[[rows.context.argmin()]]))
        among = self._patience * pace / alone
        return keeps_objectives(rows, view.start, (among * alone + every) / (among + 1.0))

    def _shed(self, view: View) -> tuple[Grant, ...]:
        """Decode all rows, or all but the longest if the joint step would not keep the tightest TPOT.

        While requests wait for pages, which rows hold until they end, only if another row would be late.
        """
        rows = view.decode
        count, context = len(rows), rows.context
        limit = MARGIN * tightest_pace(rows)
        every = view.perf.step_time(decode_load(rows))
        if every <= limit:
            return one_each(rows)
        slack = promised(rows, rows.deadline) - view.start
        if view.kv_waiting and not ((slack < every) & (slack > -BEHIND * promised(rows, rows.tpot))).any():
            return one_each(rows)
        order = np.argsort(context, kind="stable")
        sorted_: Array = context[order]
        seconds = view.perf.decode_times(np.arange(1.0, count + 1.0), sorted_, np.cumsum(sorted_))
        fits = max(1, int(np.searchsorted(seconds, limit, side="right")))
        if _waited(view, order[fits:], self._patience * rows.tpot[order[fits:]], limit).any():
            return one_each(rows)
        return one_each(rows[row] for row in np.sort(order[:fits]).tolist())

    def _mixed(self, view: View, order: Order, longest: _Longest) -> tuple[Grant, ...]:
        """Make a step for prompts that can be on time: of the decodes, only those that cannot skip it are certain."""
        rows, bound = view.decode, longest.mixed
        if not isfinite(bound):
            return one_each(rows) + self._piggyback(view, decode_load(rows), order, bound).grants
        tpot = _finite_tpot(view)
        slack = rows.deadline - view.start
        urgent = (slack < bound + (1.0 + self._cushion) * tpot) & (slack > -BEHIND * tpot)
        urgent[rows.standard :] = False
        spared = np.flatnonzero(~urgent)
        if len(spared):
            urgent[spared] = _waited(view, spared, self._patience * tpot[spared], bound)
        chosen, others = np.flatnonzero(urgent), np.flatnonzero(~urgent)
        riders = self._piggyback(view, load_of(rows.context[chosen]), order, bound)
        if len(others):
            others = others[np.argsort(rows.context[others], kind="stable")]
            fits = fitting(view.perf.step_time, riders.load, rows.context[others], min(bound, longest.brief))
            chosen = np.concatenate([chosen, others[:fits]])
        if not len(chosen) and not riders.certain:
            chosen = np.arange(1)  # the prompts may get no pages
        return one_each(rows[row] for row in chosen.tolist()) + riders.grants

    def _longest(self, view: View, hope: bool) -> _Longest:
        """Return the bounds of a step.

        A step of prompts is shorter for rows that joined late, until they are on time. On mixed
        instances, decodes that are too slow by themselves must not block prompts. Without `hope` for any
        decode, no step is cut short for them.
        """
        if not hope:
            return _Longest(inf if len(view.decode) and len(view.prefill) else 0.0, inf)
        spare = MARGIN * spare_time(view) if view.role is Role.MIXED else inf
        return _Longest(self._bound(view), spare if spare > 0.0 else inf)

    def _bound(self, view: View) -> float:
        if view.role is Role.PREFILL or not len(view.decode) or not len(view.prefill):
            return 0.0
        alone = view.perf.step_time(decode_load(view.decode))
        bound = min(
            mixed_bound(view, GAP, self._share, self._stretch, self._cushion),
            joiners_bound(view, alone, int(self._patience)),
        )
        return max(bound, PRESSED * alone) if view.role is Role.MIXED else bound

    def _piggyback(self, view: View, load: Load, order: Order, bound: float) -> _Piggyback:
        """Cut chunks of prompts, in order, that fit beside a step of `load`.

        Stops at the first waiting prompt without a slot or pages, since time reserved for it would be lost.
        """
        rows, cut, certain = view.prefill, [], False
        slots, pages = view.free_slots, view.free_pages
        for row in order.tolist():
            request = rows[row]
            waits = request.state is State.WAITING
            if waits:
                slots, pages = slots - 1, pages - -(-request.remaining // view.limits.page_size)
                taken = row < rows.standard and view.decode.standard < len(view.decode)  # pages of best-effort decodes
                if view.kv_waiting or slots < -view.limits.rows or (min(slots, pages) < 0 and not taken):
                    break
            tokens = largest_chunk(view.perf.step_time, load, request.context, request.remaining, bound)
            if not tokens:
                break
            cut.append(Grant(request.id, tokens))
            load = load.add_chunk(tokens, request.context)
            certain = certain or not waits
        return _Piggyback(tuple(cut), load, certain)


class _Longest(NamedTuple):
    """Bounds of a step, in seconds."""

    mixed: float  # of prompts beside decodes; 0 without prompts or without decodes
    brief: float  # of work that can be postponed, so that new prompts can wait for it; inf if that does not matter


class _PromptWork(NamedTuple):
    """A started step, and the remaining work of its prompts after it."""

    due: float  # earliest TTFT deadline of its requests; -inf if all are best effort
    seconds: float
    step: int
    weight: float  # of the heaviest of its requests


class _Queue(NamedTuple):
    """Prompts by prospect."""

    on_time: Order  # rows that can be on time together, by deadline
    hopeless: tuple[int, ...]  # requests that can no longer be on time and have no first token
    others: Callable[[], Order]  # the remaining rows: displaced, hopeless, best effort; each by work
    oldest: float  # seconds that the oldest of these takes; 0 without any
    stopped: _PromptWork | None = None  # the suspended step with the earliest deadline that can be on time with them


class _Piggyback(NamedTuple):
    grants: tuple[Grant, ...]
    load: Load  # of the step with them
    certain: bool  # whether some grant cannot fail to run


def _job(view: View, task: Task) -> _PromptWork:
    due = min(
        (request.arrival + request.slo.ttft for request in task.requests if request.tier != BEST_EFFORT), default=-inf
    )
    weight = max((request.slo.weight for request in task.requests), default=1.0)
    left = [(float(left_behind(request)), float(request.context)) for request in task.requests if left_behind(request)]
    if not left:
        return _PromptWork(due, task.seconds, task.step, weight)
    tokens, context = np.array(left).T
    rest = float(view.perf.prefill_times(tokens, context, view.limits.tokens).sum())
    return _PromptWork(due, task.seconds + rest, task.step, weight)


def _whole(task: Task) -> float:
    """Return the seconds of a step from its start to its end, however much of it is done: its turns stay the same."""
    return task.total or task.seconds


def _with(
    deadline: Array, work: Array, weight: Array | None, jobs: Sequence[_PromptWork]
) -> tuple[Array, Array, Array | None]:
    """Append the deadlines, seconds and weights of started steps to those of prompts. None: all weigh the same."""
    if jobs:
        due, seconds, _, weights = zip(*jobs, strict=True)
        weight = np.concatenate([np.ones(len(work)) if weight is None else weight, weights])
        deadline, work = np.concatenate([deadline, due]), np.concatenate([work, seconds])
    return deadline, work, None if weight is None or (weight == 1.0).all() else weight


def _value(chosen: Mask, weight: Array | None) -> float:
    """Return what a set of prompts counts."""
    return float(chosen.sum() if weight is None else weight[chosen].sum())


def _finite_tpot(view: View) -> Array:
    """Return the TPOT of each row in seconds; of a row without one the time of a step of all rows."""
    tpot: Array = view.decode.tpot
    without = np.isinf(tpot)
    return np.where(without, view.perf.step_time(decode_load(view.decode)), tpot) if without.any() else tpot


def _waited(view: View, which: Order, most: Array, seconds: float) -> Mask:
    """Return which rows cannot skip a step of `seconds`: they have waited `most`, or would break their TBT."""
    last = view.decode.last(which)
    waited: Mask = ~(view.start - last < most) | (view.start + 2.0 * seconds - last > view.decode.tbt[which])
    return waited
