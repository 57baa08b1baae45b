"""FairBatching (arXiv 2510.14392): steps sized by the slack of the decodes, prompts before decodes that can wait."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from ..api.policy import Decision, Order, Role, View
from ..feasibility import (
    Cost,
    deadlines,
    decode_load,
    hopeful,
    load_of,
    on_time_set,
    piggyback_speed,
    remaining_work,
    starved,
    tightest_pace,
    tightest_tbt,
)
from .batch import Batch, admissible, stall_free_tokens

EXPECTED = 1000  # tokens: the context assumed for each decode if the budget counts only tokens


class Budget(NamedTuple):
    """The bound of a step, and the cost that is compared with it."""

    cost: Cost
    bound: float
    seconds: float  # expected duration of the step: decodes that cannot wait that long go first
    time: Cost  # seconds of a step as the budget models it


class FairBatching:
    """A policy that fills each step in three groups, by slack, up to a time budget (section 3.3, Algorithm 1).

    The groups are decodes that cannot wait one more step, which are always in; prompts; other decodes.
    The budget is the least slack of any decode, but at least the tightest TPOT (section 3.2). Without
    decodes only `limits.tokens` bounds the step. A TBT, of which the paper knows none, is a deadline of
    the next token as well.

    anchor: what decode deadlines count from. `first`: the actual first token. `arrival`: arrival + TTFT,
        as published, which cannot hold the worst-case mean TPOT.
    use: share of the budget that is used. At 1, every prediction error is a miss.
    budget: `slo`: as above. `tokens`: the same budget, filled by a model that sees tokens but not
        contexts (FB-TB in the paper). `fixed:N`: N tokens regardless of slack. `fixed`: as many tokens
        as take `use` of the tightest TPOT (FB-FB), or `limits.tokens` on a prefill instance.
    on_time_set: put the largest set of prompts that can be on time first, instead of ordering by slack,
        which puts late prompts first and so makes others late.
    """

    def __init__(
        self, anchor: str = "first", use: float = 0.95, budget: str = "slo", on_time_set: bool = False
    ) -> None:
        if anchor not in ("first", "arrival"):
            raise InvalidValue(f"fairbatching {anchor=} must be first or arrival", "anchor")
        if not 0 < use <= 1:
            raise InvalidValue(f"fairbatching {use=} must be more than 0 and at most 1", "use")
        self._anchored = anchor == "first"
        self._use = use
        self._budget = _budget(budget, use)
        self._on_time_set = on_time_set

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision()
        slack, pace = self._slack(view), tightest_pace(view.decode)
        room = float(slack.min()) if len(slack) else inf
        budget = self._budget(view, max(room, pace) if room < inf else inf)
        by_slack = np.argsort(slack, kind="stable")
        prompts = admissible(view, self._order(view))
        urgent = int(np.count_nonzero(slack < budget.seconds + pace))
        least = load_of(view.decode.context[by_slack[:urgent]])  # every step contains these decodes
        lost = len(slack) > 0 and self._lost(view, budget, least)
        if not lost:
            batch = self._batch(view, budget, by_slack, urgent, prompts)
            lost = self._lost(view, budget, batch.load)
        if lost:  # no decode can meet its objectives, so the budget would gain nothing
            batch = self._batch(view, Budget(_free, inf, inf, _free), by_slack, len(by_slack), prompts)
        return batch.decision(by_slack)

    def _lost(self, view: View, budget: Budget, load: Load) -> bool:
        """Return whether a step of `load` is too long for every row, so that its budget gains nothing."""
        return self._anchored and isfinite(budget.bound) and not hopeful(view, budget.time(load))

    def _batch(self, view: View, budget: Budget, by_slack: Order, urgent: int, prompts: tuple[Order, Order]) -> Batch:
        """Fill a step with the first `urgent` decodes and all others that have waited too long, then by group."""
        batch, served = Batch(view, budget.cost, budget.bound), view.decode.standard
        batch.decode(by_slack[:urgent], always=True)
        others = by_slack[urgent:]
        if self._anchored and len(others):
            joining = starved(view, others)
            if len(joining):
                batch.decode(joining, always=True)
                others = others[~np.isin(others, joining)]
        (ready, later), best = prompts, others >= served
        last = ready >= view.prefill.standard
        batch.prompts(ready[~last])
        batch.decode(others[~best])
        batch.decode(others[best])
        batch.prompts(ready[last])
        batch.prompts(later)
        return batch

    def _slack(self, view: View) -> Array:
        """Return the seconds that each decode can wait: inf for best effort."""
        rows = view.decode
        deadline = rows.deadline
        if isfinite(tightest_tbt(rows)):
            every = np.arange(len(rows))
            deadline = np.minimum(deadline, np.nan_to_num(rows.last(every), nan=view.start) + rows.tbt)
        if rows.standard < len(rows):
            deadline = np.where(rows.best_effort > 0, inf, deadline)
        if not self._anchored:
            first = np.array([request.first_token_at or 0.0 for request in rows])
            deadline = deadline + (rows.arrival + rows.ttft - first)
        return deadline - view.start

    def _order(self, view: View) -> Order:
        """Order prompts by slack, or the on-time set first. Best effort is last."""
        rows = view.prefill
        if not self._on_time_set or not len(rows):
            return np.lexsort((rows.deadline, rows.best_effort))
        work = remaining_work(view, rows) / max(0.05, self._speed(view))
        deadline = deadlines(rows)
        chosen = on_time_set(view.start, deadline, work)
        first, left = np.flatnonzero(chosen), np.flatnonzero(~chosen)  # `left` includes best effort
        first = first[np.argsort(deadline[first], kind="stable")]
        return np.concatenate([first, left[np.lexsort((work[left], rows.best_effort[left]))]])

    def _speed(self, view: View) -> float:
        return 1.0 if view.role is Role.PREFILL else piggyback_speed(view, self._use * tightest_pace(view.decode))


def _budget(text: str, use: float) -> Callable[[View, float], Budget]:
    """Parse `budget` into a function of a view and the seconds its decodes can wait."""
    name, colon, count = text.partition(":")
    if text == "slo":
        return lambda view, seconds: Budget(view.perf.step_time, use * seconds, seconds, view.perf.step_time)
    if text == "tokens":
        return lambda view, seconds: _by_tokens(view, use * seconds, seconds)
    if name == "fixed" and (not colon or (count.isdecimal() and int(count) > 0)):
        return lambda view, seconds: _fixed(view, int(count or 0) or _profiled(view, use))
    raise InvalidValue(f"fairbatching budget={text!r} must be slo, tokens, fixed or fixed:N with N tokens", "budget")


def _profiled(view: View, use: float) -> int:
    """Return the tokens that a profile would set: all where no decode waits for a step of prompts to end."""
    return view.limits.tokens if view.role is Role.PREFILL else stall_free_tokens(view, use)


def _fixed(view: View, tokens: int) -> Budget:
    seconds = view.perf.step_time(decode_load(view.decode).add_chunk(max(0, tokens - len(view.decode)), 0))
    return Budget(lambda load: load.tokens, tokens, seconds, view.perf.step_time)


def _by_tokens(view: View, bound: float, seconds: float) -> Budget:
    def time(load: Load) -> float:
        return view.perf.step_time(_blind(load))

    return Budget(time, bound, seconds, time)


def _free(load: Load) -> float:
    return 0.0


def _blind(load: Load) -> Load:
    """Replace the contexts of a load with the assumed one."""
    longest = EXPECTED if load.decode else 0
    return Load(load.prefill, load.decode, longest=longest, context=longest * load.decode)
