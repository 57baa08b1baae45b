"""SLOs-Serve (arXiv 2504.08784): promise SLOs if possible, and serve other requests from what is left.

The dynamic program in dp.py decides which new requests are promised their SLOs, for the largest sum of
values by priority. Declined requests become best effort (section 4.1). A step lasts as long as the
tightest TPOT of the running decodes allows (Algorithm 2), or longer if drafts gain several tokens
(section 3.2.3). It holds, each by deadline: decodes that must run now, promised prompts, other decodes,
best effort.

Readings of the paper:

- A decode must run now unless another step may end before its next token is due: line 8 with <=, and
  counted from the row's last token, so that a row does not pause for the whole time it is ahead.
- A step that completes a prompt ends by the deadline of that prompt.
- A step without decodes, which the paper does not bound, is no longer than a new request with the
  tightest promise on this instance can wait (`commitments.quantum`).
- A promise is void once its first token is late; the request becomes best effort.
- An instance that has promised nothing promises any request that it can serve in time alone, even if
  the sums of the program do not admit it.
"""

from __future__ import annotations

from itertools import islice
from math import inf, log2

import numpy as np

from ...api.perf import Load
from ...api.policy import Decision, Grant, Order, QueueView, Role, View, one_each
from ...api.request import State
from ...feasibility import (
    BEHIND,
    GRID,
    NO_ROWS,
    Mask,
    decode_load,
    fitting,
    held_by_best_effort,
    joined,
    keeps_objectives,
    largest_chunk,
    paces,
    remaining_work,
    starved,
    tightest_pace,
)
from .commitments import ROUNDING, alone, check_block, idle_of, prompts_of, standing_of, terms_of
from .dp import admitted, tier_of, tiers, values
from .speculation import NEVER, WINDOW, Pace, PrefillSupply, StepCosts


class SlosServe:
    """A policy that promises SLOs by dynamic programming and fills steps by deadline.

    admit: promise and demote; if False, all requests are served by deadline.
    spec: draft if `limits.draft` allows it.
    dynamic: steps as long as the running decodes allow; if False, as the tightest TPOT ever seen allows.
    margin: share of every TPOT kept in reserve.
    block: longest step without decodes, as a share of the median TTFT. 0 derives it from the tightest
        promise.
    output: tokens that a request is assumed to generate, for its memory only.
    caution: see `speculation.counted_on`; 0 is as published.

    Raises InvalidValue if `block` is negative. Writer of its promises, of the tightest TPOT seen, and of
    values cached until a request comes or goes. All follow from the sequence of views.
    """

    def __init__(
        self,
        admit: bool = True,
        spec: bool = True,
        dynamic: bool = True,
        margin: float = 0.05,
        block: float = 0.0,
        output: int = 256,
        caution: float = 1.0,
    ) -> None:
        self._admit = admit
        self._spec = spec
        self._dynamic = dynamic
        self._margin = margin
        self._block = check_block(block)
        self._output = output
        self._caution = caution
        self._promised: set[int] = set()
        self._decided: tuple[QueueView, int] | None = None  # the version of the prompts that has no new ones
        self._there: tuple[QueueView, int, QueueView, int] | None = None  # the requests that `_idle` was computed for
        self._idle = NEVER
        self._tightest = inf
        self._paces: dict[tuple[float, ...], Pace] = {}

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision()
        terms = self._terms(view)
        mine, declined = self._promise(view, terms)
        pace = self._pace(view, terms)
        step = _Step(view, pace, terms)
        decision = step.decision(mine, declined)
        if view.decode.standard and view.role is not Role.PREFILL and not step.keeps_objectives():
            return _Step(view, pace._replace(seconds=inf), terms).decision(mine, declined)
        return decision

    def _terms(self, view: View) -> StepCosts:
        fixed, there = None, (view.prefill, view.prefill.members, view.decode, view.decode.members)
        if there != self._there:
            self._there, self._idle = there, idle_of(view, self._block)
        if not self._dynamic:
            self._tightest = min(self._tightest, tightest_pace(view.prefill), tightest_pace(view.decode))
            fixed = (1.0 - self._margin) * self._tightest
        draft = view.limits.draft if self._spec else 0
        return terms_of(view, self._idle, draft=draft, margin=self._margin, fixed=fixed, caution=self._caution)

    # promises

    def _promise(self, view: View, terms: StepCosts) -> tuple[Order, Order]:
        """Return the promised rows of `view.prefill` by deadline, and the rows that are declined now."""
        rows = view.prefill
        count = rows.standard
        declined = self._declined(view, terms, count) if self._admit and count else NO_ROWS
        order = rows.deadline[:count].argsort(kind="stable")
        if len(declined):
            stays = np.ones(count, dtype=bool)
            stays[declined] = False
            order = order[stays[order]]
        return order, declined

    def _declined(self, view: View, terms: StepCosts, count: int) -> Order:
        """Return which of the first `count` rows of `view.prefill`, none yet best effort, become best effort now."""
        rows = view.prefill
        new = self._undecided(rows, count)
        declined = late = self._late(view, count, new)
        if len(new):
            stays = np.ones(count, dtype=bool)
            stays[new] = stays[late] = False
            every = prompts_of(view, count, self._output)
            standing = standing_of(view, every.at(np.flatnonzero(stays)), self._output)
            worth = values([rows[row].priority for row in new.tolist()])
            kept = admitted(standing, every.at(new), terms, worth, lambda: alone(view, new))
            self._promised.update(rows[row].id for row in new[kept].tolist())
            declined = np.concatenate([new[~kept], late])
        self._decided = None if len(declined) else (rows, rows.members)
        return declined

    def _undecided(self, rows: QueueView, count: int) -> Order:
        """Return the new requests among the first `count`. Those that run or have run count as promised."""
        if self._decided == (rows, rows.members):
            return NO_ROWS
        promised = self._promised
        if len(promised) > 64 + 4 * count:
            promised.intersection_update([queued.id for queued in islice(rows, count)])
        new = []
        for row in [row for row, queued in enumerate(islice(rows, count)) if queued.id not in promised]:
            request = rows[row]
            if request.state is State.WAITING and not request.generated:
                new.append(row)
            else:
                promised.add(request.id)
        return np.array(new, dtype=np.intp)

    @staticmethod
    def _late(view: View, count: int, new: Order) -> Order:
        """Return which of the first `count` rows of `view.prefill`, except `new`, can no longer be on time, even alone.

        Only rows without a first token count.
        """
        rows = view.prefill
        late = np.flatnonzero(view.start + remaining_work(view, rows, count) > rows.deadline[:count] + ROUNDING)
        if not len(late):
            return late
        come = set(new.tolist())
        return late[[row not in come and not rows[row].generated for row in late.tolist()]]

    # steps

    def _pace(self, view: View, terms: StepCosts) -> Pace:
        """Choose the step duration and the draft lengths, cached while the decodes are about the same."""
        rows = view.decode
        count = rows.standard
        if view.role is Role.PREFILL or not count:
            return Pace(terms.idle if terms.fixed is None else terms.fixed, (1,), 0.0)
        if not terms.draft:
            longest = tightest_pace(rows)
            seconds = (1.0 - terms.margin) * longest if longest < NEVER else terms.idle
            return Pace(seconds if terms.fixed is None else min(seconds, terms.fixed), (1,), 0.0)
        each = paces(rows)
        among = tiers(each)
        counts = np.bincount(tier_of(each, among), minlength=len(among)).tolist()
        context = float(rows.context.sum())
        key = (*among.tolist(), *map(_about, counts), _about(context), round(terms.acceptance * 50), terms.idle)
        pace = self._paces.get(key)
        if pace is None:
            if len(self._paces) > 256:
                self._paces.clear()
            supply = PrefillSupply(terms, among.tolist(), decode_load(rows), len(rows), context / len(rows))
            pace = self._paces[key] = supply.pace(counts)
        return pace


def _about(amount: float) -> float:
    """Map amounts that differ by less than about 6 % to the same number."""
    return float(round(12.0 * log2(1.0 + amount)))


class _Step:
    """One step under construction. Writer of its load and its grants."""

    def __init__(self, view: View, pace: Pace, terms: StepCosts) -> None:
        self._view = view
        self._pace = pace
        self._grants: list[Grant] = []
        self.load = Load()
        self._cautious = terms.caution > 0
        self._certain = False  # whether some grant cannot fail to run
        rows = view.decode
        self._count = rows.standard
        self._lengths = self._drafts(rows)
        self._gain = np.array([0.0, *terms.gains()])[self._lengths] - 1.0 if len(self._lengths) else self._lengths
        self._bound = pace.seconds if pace.seconds == inf else self._hurry(rows, terms.margin)
        self._room: float = view.free_pages - len(rows)  # pages; each decode may need one to grow
        self._slots = view.free_slots
        self._full = False  # whether a granted prompt has to wait for pages or a slot

    def decision(self, mine: Order, declined: Order) -> Decision:
        """Fill the step. mine: promised prompts in order. declined: prompts that become best effort now."""
        view, rows = self._view, self._view.decode
        now = self._now(rows)
        others = np.flatnonzero(~now)
        best = np.arange(self._count, len(rows))
        left = np.concatenate([others, best]) if len(best) else others
        waited = starved(view, left)
        self._decode(np.flatnonzero(now))
        if len(waited):
            others, best = others[~np.isin(others, waited)], best[~np.isin(best, waited)]
            self._decode(waited)
        pages, slots = held_by_best_effort(view, np.ceil)
        self._room, self._slots = self._room + pages, self._slots + slots
        self._prompts(mine)
        self._room, self._slots = self._room - pages, self._slots - slots
        self._decode_some(others)
        self._decode_some(best)
        best = np.arange(view.prefill.standard, len(view.prefill))
        self._prompts(np.concatenate([best, declined]))
        if not self._certain:
            self._fall_back(np.concatenate([mine, best, declined]))
        return Decision(tuple(self._grants), tuple(view.prefill[row].id for row in declined.tolist()))

    def keeps_objectives(self) -> bool:
        """Return whether some row keeps its objectives with steps like this one, given its expected gain per step."""
        seconds = self._view.perf.step_time(self.load)
        gain = 1.0 + float(self._gain.max()) if len(self._gain) else 1.0
        return keeps_objectives(self._view.decode, self._view.start, seconds / gain)

    def _drafts(self, rows: QueueView) -> Order:
        """Return the tokens that each row verifies, or an empty array if no row drafts."""
        if max(self._pace.lengths) == 1:
            return NO_ROWS
        lengths, each = np.ones(len(rows), dtype=np.intp), paces(rows)
        lengths[: self._count] = np.array(self._pace.lengths)[tier_of(each, tiers(each))]
        return lengths

    def _hurry(self, rows: QueueView, margin: float) -> float:
        """Return the step duration of the pace, shortened for rows that need it.

        These are rows that have fallen behind (the paper tightens their SLO; here the step is at most
        halved), and rows too young to rely on a mean over several drafts.
        """
        seconds, count = self._pace.seconds, self._count
        if not count or self._view.role is Role.PREFILL:
            return seconds
        slack, tpot = rows.deadline[:count] - self._view.start, np.minimum(rows.tpot[:count], NEVER)
        ahead = slack
        if len(self._gain):
            age = rows.context[:count] - rows.length[:count] + 1.0
            even = np.minimum(1.0, age / WINDOW) if self._cautious else 1.0
            ahead = slack + self._gain[:count] * even * tpot
        allowed = np.where(slack > -BEHIND * tpot, ahead, inf)
        return min(seconds, max(0.5 * seconds, (1.0 - margin) * float(np.minimum.reduce(allowed))))

    def _now(self, rows: QueueView) -> Mask:
        """Return which decodes, without best effort, would be late with their next token if they skipped this step."""
        count, soon = self._count, self._view.start + 2.0 * self._bound
        tpot, tbt = np.minimum(rows.tpot[:count], NEVER), rows.tbt[:count]
        if not count or float(np.minimum(tpot, tbt).max()) <= 2.0 * self._bound:
            return np.ones(count, dtype=bool)
        gained = self._gain[:count] * tpot if len(self._gain) else np.zeros(count)
        now: Mask = rows.deadline[:count] + gained < soon
        others = np.flatnonzero(~now)
        now[others] = rows.last(others) + np.minimum(tpot[others] + gained[others], tbt[others]) < soon
        return now

    # grants

    def _decode(self, order: Order) -> None:
        rows, limits = self._view.decode, self._view.limits
        if not len(order):
            return
        named = iter(rows) if len(order) == len(rows) else [rows[row] for row in order.tolist()]
        tokens, drafts = len(order), 0
        if len(self._lengths) and int(self._lengths[order].sum()) <= limits.tokens:
            lengths = self._lengths[order].tolist()
            tokens, drafts = sum(lengths), max(lengths) - 1
            self._grants += [Grant(request.id, 1, length - 1) for request, length in zip(named, lengths, strict=True)]
        else:
            self._grants += one_each(named)
        load = joined(self.load, rows.context[order], tokens)
        self.load = load if drafts <= load.drafts else load._replace(drafts=drafts)
        self._certain = True

    def _decode_some(self, order: Order) -> None:
        """Grant decodes in order as long as they fit, or all of them if nothing else is sure to run."""
        if len(order) and self._certain:
            tokens = np.add.accumulate(self._lengths[order]).tolist() if len(self._lengths) else None
            context = self._view.decode.context[order]
            order = order[: fitting(self._view.perf.step_time, self.load, context, self._bound, tokens)]
        self._decode(order)

    def _fall_back(self, order: Order) -> None:
        """Add prompts that hold pages and a slot, in case the granted ones find none."""
        rows, named = self._view.prefill, {grant.request for grant in self._grants}
        for row in order[rows.running[order] > 0].tolist():
            request = rows[row]
            if request.id not in named:
                self._grants.append(Grant(request.id, min(request.remaining, GRID)))

    def _prompts(self, order: Order) -> None:
        """Grant chunks in order while the step has room.

        Once a prompt has to wait for pages or a slot, the waiting prompts behind it wait, too.
        """
        rows, view = self._view.prefill, self._view
        if self._full:
            order = order[rows.running[order] > 0]
        for at, row in enumerate(map(int, order), 1):  # lazily: the loop ends after a few of possibly thousands
            request = rows[row]
            waits = request.state is State.WAITING
            left = min(request.remaining, view.limits.tokens - self.load.tokens)
            tokens = largest_chunk(view.perf.step_time, self.load, request.context, left, self._bound)
            if not tokens and not self._grants:
                tokens = min(left, GRID)
            if not tokens:
                break
            self._grants.append(Grant(request.id, tokens))
            if waits:
                self._room -= -(-request.remaining // view.limits.page_size)
                self._slots -= 1
                self._full = self._room < 0 or self._slots < 0
                if self._full:
                    self._prompts(order[at:])
                    return
            self._certain = self._certain or not waits
            self.load = self.load.add_chunk(tokens, request.context)
            slack = request.deadline - view.start
            if tokens == request.remaining and view.perf.step_time(self.load) <= slack:
                self._bound = min(self._bound, slack)
