"""FairBatching (arXiv 2510.14392): steps as long as those who decode can spare, prompts before those that can wait."""

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
    tightest_tpot,
)
from .batch import Batch, admissible, stall_free_tokens

EXPECTED = 1000  # tokens of context of a decoding row, to a budget that is counted in tokens


class Budget(NamedTuple):
    """How much a step may hold, and what is compared with it."""

    cost: Cost
    bound: float
    seconds: float  # that such a step takes: decodes which cannot wait for its end go first
    time: Cost  # seconds of a step, as far as the budget sees them


class FairBatching:
    """Section 3.3 (Algorithm 1): first the decoding rows that cannot wait for a step more, always; then prompts; then
    the other decoding rows; each by slack, until the step takes as long as its budget, which is the least slack of
    any decoding row, but at least the tightest tpot (section 3.2). Without decoding rows only limits.tokens bounds it.

    anchor: what a decode deadline is counted from: `first`, the first token itself, or `arrival`, arrival + TTFT, as
    published, with which the worst mean time per token cannot hold. margin: share of the budget that is used: with
    all of it any error of the prediction is a miss. budget: `slo` as above; `tokens` counts it in tokens instead,
    blind to contexts (the paper's FB-TB); `fixed:N` is N tokens whatever the slack, `fixed` those that take `margin`
    of the tightest tpot (FB-FB). on_time_set: prompts not by slack, with which late ones go first and make others
    late, but the largest set that can be on time first.
    """

    def __init__(
        self, anchor: str = "first", margin: float = 0.95, budget: str = "slo", on_time_set: bool = False
    ) -> None:
        if anchor not in ("first", "arrival"):
            raise InvalidValue(f"fairbatching {anchor=} must be first or arrival", "anchor")
        if not 0 < margin <= 1:
            raise InvalidValue(f"fairbatching {margin=} must be more than 0 and at most 1", "margin")
        self._anchored = anchor == "first"
        self._margin = margin
        self._budget = _budget(budget, margin)
        self._on_time_set = on_time_set

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision()
        slack, tpot = self._slack(view), tightest_tpot(view.decode)
        room = float(slack.min()) if len(slack) else inf
        budget = self._budget(view, max(room, tpot) if room < inf else inf)
        by_slack = np.argsort(slack, kind="stable")
        prompts = admissible(view, self._order(view))
        urgent = int(np.count_nonzero(slack < budget.seconds + tpot))
        least = load_of(view.decode.context[by_slack[:urgent]])  # no step is shorter
        lost = len(slack) > 0 and self._lost(view, budget, least)
        if not lost:
            batch = self._batch(view, budget, by_slack, urgent, prompts)
            lost = self._lost(view, budget, batch.load)
        if lost:  # too long for every row in any case
            batch = self._batch(view, Budget(_free, inf, inf, _free), by_slack, len(by_slack), prompts)
        return batch.decision(by_slack)

    def _lost(self, view: View, budget: Budget, load: Load) -> bool:
        """Whether a step of `load` is too long for every row, so that nothing is gained by its budget."""
        return self._anchored and isfinite(budget.bound) and not hopeful(view, budget.time(load))

    def _batch(self, view: View, budget: Budget, by_slack: Order, urgent: int, prompts: tuple[Order, Order]) -> Batch:
        """The step: the first `urgent` rows that decode for sure, and those others that have waited too long."""
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
        """Seconds that each decoding row can wait; best effort for ever."""
        rows = view.decode
        deadline = rows.deadline
        if rows.standard < len(rows):
            deadline = np.where(rows.best_effort > 0, inf, deadline)
        if not self._anchored:
            first = np.array([request.first_token_at or 0.0 for request in rows])
            deadline = deadline + (rows.arrival + rows.ttft - first)
        return deadline - view.start

    def _order(self, view: View) -> Order:
        """Prompts by slack, or those that can be on time first; best effort last."""
        rows = view.prefill
        if not self._on_time_set or not len(rows):
            return np.lexsort((rows.deadline, rows.best_effort))
        work = remaining_work(view, rows) / max(0.05, self._speed(view))
        deadline = deadlines(rows)
        chosen = on_time_set(view.start, deadline, work)
        first, left = np.flatnonzero(chosen), np.flatnonzero(~chosen)  # best effort is among the others
        first = first[np.argsort(deadline[first], kind="stable")]
        return np.concatenate([first, left[np.lexsort((work[left], rows.best_effort[left]))]])

    def _speed(self, view: View) -> float:
        return 1.0 if view.role is Role.PREFILL else piggyback_speed(view, self._margin * tightest_tpot(view.decode))


def _budget(text: str, margin: float) -> Callable[[View, float], Budget]:
    """What makes the budget of a view whose decodes leave so many seconds."""
    name, colon, count = text.partition(":")
    if text == "slo":
        return lambda view, seconds: Budget(view.perf.step_time, margin * seconds, seconds, view.perf.step_time)
    if text == "tokens":
        return lambda view, seconds: _by_tokens(view, margin * seconds, seconds)
    if name == "fixed" and (not colon or (count.isdecimal() and int(count) > 0)):
        return lambda view, seconds: _fixed(view, int(count or 0) or stall_free_tokens(view, margin))
    raise InvalidValue(f"fairbatching budget={text!r} must be slo, tokens, fixed or fixed:N with N tokens", "budget")


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
    """The step as its tokens alone tell of it."""
    longest = EXPECTED if load.decode else 0
    return Load(load.prefill, load.decode, longest=longest, context=longest * load.decode)
