"""SLOs-Serve (arXiv 2504.08784): promise requests their SLOs where possible, serve the others from what is left.

New requests are promised by the dynamic program in dp.py, for the most value by priority; those declined become best
effort (section 4.1). A step lasts as long as the tightest tpot of the rows that decode allows (Algorithm 2), longer
where drafts gain several tokens (3.2.3). In it, by deadline: rows that must decode now, promised prompts, the other
rows; then best effort.

Readings: a row must decode now unless another step may end before its next token is due (line 8 with <=, and
counted from the row's last token, so that a row that is ahead is not stopped for all it is ahead). A step that ends a
prompt ends by that prompt's deadline; one in which nothing decodes, which the paper bounds by nothing, lasts no longer
than a newcomer with the tightest promise here can wait (standing.quantum). Once its first token is late a promise is
void, and the request best effort. A server that has promised nothing promises every request that it can serve in time
alone, whatever the sums of the program say.
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
    NOBODY,
    Mask,
    decode_load,
    fitting,
    held_by_best_effort,
    joined,
    keeps_objectives,
    largest_chunk,
    remaining_work,
    starved,
    tightest_tpot,
)
from .commitments import ROUNDING, alone, check_block, idle_of, prompts_of, standing_of, terms_of
from .dp import admitted, tier_of, tiers, values
from .speculation import NEVER, WINDOW, Pace, PrefillSupply, StepCosts


class SlosServe:
    """admit: promise by the dynamic program, and demote; otherwise all are served by deadline. spec: draft where
    limits.draft allows. dynamic: steps as long as the rows that decode now allow; otherwise never longer than the
    tightest tpot seen allows. margin: share of every tpot kept back. block: the longest step without decoding rows, as
    a share of the median ttft, where it is not to follow from the tightest promise (0). output: tokens that a request
    is taken to generate, for its memory alone. caution: see speculation.counted_on; 0 is as published. Raises
    InvalidValue where block is negative.

    Writer of what it promised, of the tightest tpot seen, and of what follows from the set of requests alone, kept
    until one comes or goes: all follow from the views, in order.
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
        self._decided: tuple[QueueView, int] | None = None  # the prompts among which nobody is new
        self._there: tuple[QueueView, int, QueueView, int] | None = None  # those of whom is `_idle`
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
            self._tightest = min(self._tightest, tightest_tpot(view.prefill), tightest_tpot(view.decode))
            fixed = (1.0 - self._margin) * self._tightest
        draft = view.limits.draft if self._spec else 0
        return terms_of(view, self._idle, draft=draft, margin=self._margin, fixed=fixed, caution=self._caution)

    # promises

    def _promise(self, view: View, terms: StepCosts) -> tuple[Order, Order]:
        """Rows of view.prefill that are promised, by deadline, and those that are declined now."""
        rows = view.prefill
        count = rows.standard
        declined = self._declined(view, terms, count) if self._admit and count else NOBODY
        order = rows.deadline[:count].argsort(kind="stable")
        if len(declined):
            stays = np.ones(count, dtype=bool)
            stays[declined] = False
            order = order[stays[order]]
        return order, declined

    def _declined(self, view: View, terms: StepCosts, count: int) -> Order:
        """Of the first `count` rows of view.prefill, which are not best effort, those that are from now on."""
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
        """New requests among the first `count`. Who runs, or has run, is promised already, whoever did it."""
        if self._decided == (rows, rows.members):
            return NOBODY
        promised = self._promised
        if len(promised) > 64 + 4 * count:
            promised.intersection_update([one.id for one in islice(rows, count)])
        new = []
        for row in [row for row, one in enumerate(islice(rows, count)) if one.id not in promised]:
            request = rows[row]
            if request.state is State.WAITING and not request.generated:
                new.append(row)
            else:
                promised.add(request.id)
        return np.array(new, dtype=np.intp)

    @staticmethod
    def _late(view: View, count: int, new: Order) -> Order:
        """Of the first `count` rows of view.prefill, new ones aside, those whose first token can no longer be in time,
        even alone."""
        rows = view.prefill
        late = np.flatnonzero(view.start + remaining_work(view, rows, count) > rows.deadline[:count] + ROUNDING)
        if not len(late):
            return late
        come = set(new.tolist())
        return late[[row not in come and not rows[row].generated for row in late.tolist()]]

    # steps

    def _pace(self, view: View, terms: StepCosts) -> Pace:
        """How long a step may be, and how much its rows draft: kept while the rows are about the same."""
        rows = view.decode
        count = rows.standard
        if view.role is Role.PREFILL or not count:
            return Pace(terms.idle if terms.fixed is None else terms.fixed, (1,), 0.0)
        if not terms.draft:
            tpot = tightest_tpot(rows)
            seconds = (1.0 - terms.margin) * tpot if tpot < NEVER else terms.idle
            return Pace(seconds if terms.fixed is None else min(seconds, terms.fixed), (1,), 0.0)
        among = tiers(rows.tpot[:count])
        counts = np.bincount(tier_of(rows.tpot[:count], among), minlength=len(among)).tolist()
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
    """The same for amounts that differ by less than some 6 %."""
    return float(round(12.0 * log2(1.0 + amount)))


class _Step:
    """One step in the making. Writer of its load and its grants."""

    def __init__(self, view: View, pace: Pace, terms: StepCosts) -> None:
        self._view = view
        self._pace = pace
        self._grants: list[Grant] = []
        self.load = Load()
        self._cautious = terms.caution > 0
        self._certain = False  # somebody is granted who cannot fail to run
        rows = view.decode
        self._count = rows.standard
        self._lengths = self._drafts(rows)
        self._gain = np.array([0.0, *terms.gains()])[self._lengths] - 1.0 if len(self._lengths) else self._lengths
        self._bound = pace.seconds if pace.seconds == inf else self._hurry(rows, terms.margin)
        self._room: float = view.free_pages - len(rows)  # pages: one a row stays for its growth
        self._slots = view.free_slots
        self._full = False  # somebody waits for pages

    def decision(self, mine: Order, declined: Order) -> Decision:
        """mine: promised prompts in order. declined: those that are best effort from now on."""
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
        """Whether some row keeps its objective with such steps, by what it gains in each."""
        seconds = self._view.perf.step_time(self.load)
        gain = 1.0 + float(self._gain.max()) if len(self._gain) else 1.0
        return keeps_objectives(self._view.decode, self._view.start, seconds / gain)

    def _drafts(self, rows: QueueView) -> Order:
        """Tokens that each row verifies; nothing where none drafts."""
        if max(self._pace.lengths) == 1:
            return NOBODY
        lengths, tpot = np.ones(len(rows), dtype=np.intp), rows.tpot[: self._count]
        lengths[: self._count] = np.array(self._pace.lengths)[tier_of(tpot, tiers(tpot))]
        return lengths

    def _hurry(self, rows: QueueView, margin: float) -> float:
        """The pace's step, shorter where a row has fallen behind (the paper strengthens its SLO; here to half the
        step at most), or is too young to count on a mean over several drafts."""
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
        """QueueView, those of best effort aside, whose next token would be late if they sat this step out."""
        count, soon = self._count, self._view.start + 2.0 * self._bound
        if not count or min(float(np.maximum.reduce(rows.tpot)), NEVER) <= 2.0 * self._bound:
            return np.ones(count, dtype=bool)
        tpot = np.minimum(rows.tpot[:count], NEVER)
        gained = self._gain[:count] * tpot if len(self._gain) else np.zeros(count)
        now: Mask = rows.deadline[:count] + gained < soon
        others = np.flatnonzero(~now)
        now[others] = rows.last(others) + tpot[others] + gained[others] < soon
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
            self._grants += [Grant(one.id, 1, length - 1) for one, length in zip(named, lengths, strict=True)]
        else:
            self._grants += one_each(named)
        load = joined(self.load, rows.context[order], tokens)
        self.load = load if drafts <= load.drafts else load._replace(drafts=drafts)
        self._certain = True

    def _decode_some(self, order: Order) -> None:
        """As many, in their order, as still fit; all of them where nobody else is sure to run."""
        if len(order) and self._certain:
            tokens = np.add.accumulate(self._lengths[order]).tolist() if len(self._lengths) else None
            context = self._view.decode.context[order]
            order = order[: fitting(self._view.perf.step_time, self.load, context, self._bound, tokens)]
        self._decode(order)

    def _fall_back(self, order: Order) -> None:
        """Those named may find no page or slot; whoever of these prompts holds both then goes on."""
        rows, named = self._view.prefill, {grant.request for grant in self._grants}
        for row in order[rows.running[order] > 0].tolist():
            request = rows[row]
            if request.id not in named:
                self._grants.append(Grant(request.id, min(request.remaining, GRID)))

    def _prompts(self, order: Order) -> None:
        """Chunks by their order, as long as the step has room. Who waits behind somebody who waits for pages waits."""
        rows, view = self._view.prefill, self._view
        if self._full:
            order = order[rows.running[order] > 0]
        for at, row in enumerate(map(int, order), 1):  # the first few of maybe thousands
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
