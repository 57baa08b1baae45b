"""FlowPrefill: prefill steps that stop at a segment boundary for a prompt of higher priority (Algorithms 1 and 2)."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from ..api.policy import Decision, Grant, Order, QueueView, Task, View
from ..api.request import BEST_EFFORT, RequestView
from ..feasibility import Mask, left_behind, prompt_time, remaining_work
from .ordered import LONG, aged, checked_share, longs_turn, sort

ORDERS = ("sedf", "deadline_edf", "edf")
CANDIDATES = 64  # prompts considered for a batch
EMPTY_RANK = (3.0,)  # rank of a step without live requests: it only holds pages

Rank = tuple[float, ...]  # (best effort, late, deadline); the lowest rank runs first


class FlowPrefill:
    """A prefill policy that runs the prompt of highest priority alone, or with a few short ones.

    Preempted steps resume later. Priority is the tuple (can be on time, deadline), which is S-EDF. The
    paper's sgn(slack)/deadline (Equation 3) puts the latest deadline first among late prompts. A started
    step is predicted by its remaining work; by its total work, a nearly finished step would look hopeless
    and be preempted. A prompt that will be late anyway, or that cannot get pages, preempts nothing.

    Short prompts join the first one (Algorithm 1) while the batch stays below `batch` tokens, all its
    members are on time, and the batch makes no other prompt late. If no prompt can be on time,
    late prompts share a batch in the same way. A prompt longer than `limits.tokens` takes several steps.

    batch: limit of a batch in tokens (G in the paper); 0 runs one prompt per step.
    order: `sedf`, or for comparison `deadline_edf` or `edf` (section 6.3).
    preempt: whether prefill steps may be preempted.
    ageing: see `Ordered`.
    literal: Equation 3 and Algorithm 1 as printed: a started prompt is predicted by its total work,
        late prompts preempt each other, and batch members need not be on time.
    """

    def __init__(
        self,
        batch: int = 1024,
        order: str = "sedf",
        preempt: bool = True,
        ageing: float = 0.0,
        literal: bool = False,
    ) -> None:
        if order not in ORDERS:
            raise InvalidValue(f"order={order!r} must be one of {', '.join(ORDERS)}", "policy")
        if batch < 0:
            raise InvalidValue(f"batch={batch!r} must be 0 (off) or a number of tokens", "policy")
        self._batch = batch
        self._order = order
        self._preempt = preempt
        self._ageing = checked_share(ageing)
        self._literal = literal

    @property
    def stops(self) -> bool:
        """Whether the policy preempts prefill steps."""
        return self._preempt

    def decide(self, view: View) -> Decision:
        if view.running is not None and not self._preempt:
            return Decision()
        rows, work = view.prefill, self._work(view)
        late = self._late(view.start, work, rows.deadline)
        due = np.where(late, -rows.deadline, rows.deadline) if self._literal else rows.deadline
        order = self._sorted(view, late, due)
        head = int(order[0]) if len(order) else None
        rank = EMPTY_RANK if head is None else (rows.best_effort[head], float(late[head]), due[head])
        if view.running is not None:
            return Decision(preempt=self._stops(view, view.running, head, rank))
        owed = next((task for task in view.suspended if self._owed(view, task)), None)
        task = owed or min(view.suspended, key=lambda suspended: self._rank(view, suspended), default=None)
        if task is not None and (owed or head is None or self._rank(view, task) <= rank):
            return Decision(resume=task.step)
        if head is None:
            return Decision()
        return self._start(view, order, work, late)

    # priority

    def _work(self, view: View) -> Array:
        """Predict the seconds that each row takes alone."""
        rows = view.prefill
        if self._literal:
            return view.perf.prefill_times(rows.context + rows.remaining, np.zeros(len(rows)), view.limits.tokens)
        return remaining_work(view, rows)

    def _late(self, start: float, work: Array, deadline: Array) -> Mask:
        if self._order == "edf":
            return np.zeros(len(deadline), dtype=bool)
        late: Mask = (start if self._order == "deadline_edf" else start + work) > deadline
        return late

    def _sorted(self, view: View, late: Mask, due: Array) -> Order:
        """Order the rows. While a step runs, return only the first row that is not in that step."""
        order = aged(view.prefill, sort(view.prefill, late, due), view.start, self._ageing)
        if view.running is not None and len(order):
            mine = {request.id for request in view.running.requests}
            keep = [row for row in order[: len(mine) + 1].tolist() if view.prefill[row].id not in mine]
            return np.array(keep[:1], dtype=np.intp)
        return order

    def _rank(self, view: View, task: Task) -> Rank:
        """Return the rank of a step: the best rank of its requests."""
        return min((self._rank_in(view, task, request) for request in task.requests), default=EMPTY_RANK)

    def _rank_in(self, view: View, task: Task, request: RequestView) -> Rank:
        due = request.deadline
        if request.first_token_at is None:
            due = request.arrival + request.slo.ttft  # `deadline` may already be that of the following token
        tokens, context = float(left_behind(request)), float(request.context)
        seconds = task.seconds
        if self._literal:
            tokens, context, seconds = request.context + tokens, 0.0, 0.0
        if tokens:
            seconds += prompt_time(view.perf, tokens, context, view.limits.tokens)
        late = self._order != "edf" and view.start + (seconds if self._order == "sedf" else 0.0) > due
        return (float(request.best_effort), float(late), -due if late and self._literal else due)

    def _stops(self, view: View, running: Task, head: int | None, rank: Rank) -> bool:
        """Return whether a waiting prompt or a suspended step should preempt the running step.

        Only work that can still be on time does, except with `literal`.
        """
        if self._owed(view, running):
            return False
        mine = self._rank(view, running)
        best = min((self._rank(view, task) for task in view.suspended), default=EMPTY_RANK)
        if head is not None and rank < best and self._fits(view, head):
            best = rank
        return best < mine and (self._literal or best[1] == 0.0)

    def _owed(self, view: View, task: Task) -> bool:
        """Return whether the current time is reserved for long prompts and the step computes one."""
        return longs_turn(view.start, self._ageing) and any(
            request.prompt_length >= LONG and request.tier != BEST_EFFORT for request in task.requests
        )

    def _fits(self, view: View, row: int) -> bool:
        rows = view.prefill
        if rows.running[row]:
            return True
        return -(-int(rows.remaining[row]) // view.limits.page_size) + len(view.decode) <= view.free_pages

    # what runs

    def _start(self, view: View, order: Order, work: Array, late: Mask) -> Decision:
        """Start the first prompt and its batch.

        Prompts that already hold pages are named behind them, in case the batch gets no pages.
        """
        rows = view.prefill
        chosen = self._together(view, order, work, late)
        holders = order[rows.running[order] > 0].tolist()
        named = chosen + [row for row in holders if row not in chosen]
        grants = tuple(Grant(rows[row].id, int(rows.remaining[row])) for row in named)
        return Decision(grants, prompts=len(chosen))

    def _together(self, view: View, order: Order, work: Array, late: Mask) -> list[int]:
        """Choose the batch of the first prompt: SLO-aware batching (Algorithm 1)."""
        rows, head = view.prefill, int(order[0])
        size, context = rows.remaining - rows.hit, rows.context + rows.hit
        tokens = int(size[head])
        if tokens >= self._batch or rows.best_effort[head]:
            return [head]
        load = Load().add_chunk(tokens, int(context[head]))
        due, hopeless = float(rows.deadline[head]), bool(late[head]) and not self._literal
        chosen, seconds, guard = [head], view.perf.step_time(load), _Guard(view, work, late, head)
        for row in self._candidates(rows, order, late, size < self._batch - tokens):
            left = int(size[row])
            if tokens + left >= self._batch:
                continue
            joint = load.add_chunk(left, int(context[row]))
            longer = view.perf.step_time(joint)
            if hopeless:
                chosen, load, tokens = [*chosen, row], joint, tokens + left
                continue
            first = due if self._literal else min(due, float(rows.deadline[row]))
            if view.start + longer >= first or not (self._literal or guard.allows(row, seconds, longer)):
                continue
            chosen.append(row)
            guard.leave(row)
            due, load, seconds, tokens = first, joint, longer, tokens + left
        return chosen

    def _candidates(self, rows: QueueView, order: Order, late: Mask, short: Mask) -> list[int]:
        others = order[1:]
        if not self._literal:
            short = short & (late == late[order[0]]) & (rows.best_effort == 0)
        chosen: list[int] = others[short[others]][:CANDIDATES].tolist()
        return chosen


class _Guard:
    """Slack of the requests outside a batch, which the batch must not make late. Writer: the decision that holds it."""

    def __init__(self, view: View, work: Array, late: Mask, head: int) -> None:
        rows = view.prefill
        slack = np.where(late | (rows.best_effort > 0), np.inf, rows.deadline - view.start - work)
        slack[head] = np.inf
        tasks = (
            (task.seconds, request)
            for task in view.suspended
            for request in task.requests
            if request.tier != BEST_EFFORT
        )
        stopped = [request.arrival + request.slo.ttft - view.start - seconds for seconds, request in tasks]
        self._slack: list[float] = slack.tolist()
        self._outside: list[float] = np.sort(np.concatenate([slack, stopped])).tolist()

    def leave(self, row: int) -> None:
        """Remove a row that joined the batch."""
        del self._outside[bisect_left(self._outside, self._slack[row])]

    def allows(self, row: int, before: float, after: float) -> bool:
        """Return whether extending the step from `before` to `after` seconds makes only `row` late, if any."""
        lost = bisect_left(self._outside, after) - bisect_left(self._outside, before)
        return lost <= (before <= self._slack[row] < after)
