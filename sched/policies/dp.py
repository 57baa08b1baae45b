"""The dynamic programme of SLOs-Serve (arXiv 2504.08784, section 3.2.1 and appendix C): who can be promised its SLO.

    pb[i, n] = max_j { pb[j, n - 1] - p_i + PB*(pDDL_i - pDDL_j, n - 1) },  pDDL_j <= pDDL_i in index order

pb is the prompt tokens that are left at the deadline of prompt i when n prompts up to it are taken, i the last of
them; it may never be negative. PB* grows evenly with time while the number of decoding rows stays, so the state
needs no last prompt: what is left at each deadline is carried forward whether or not the prompt there is taken. All
prompts count, also those promised before (forced in). n is one number per tier of tpot; where memory could run out,
the pages used are part of the state too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

import numpy as np

from ..feasibility import Mask
from ..perf.model import Array, Load, PerfModel
from ..policy import Order, Role, Rows, View
from .speculation import NEVER, Supply, Terms

UNITS = 16  # of memory, where it is part of the state
TIERS = 4  # distinct tpots; more are taken as the next tighter one of so many
MOST = 16  # new prompts that are decided on at a time
EASE = 1e-6  # tokens: sums of floats may not decide


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts to be computed, as columns. tokens: what they take of a step's budget. pages: what they will hold."""

    deadline: Array
    tokens: Array
    tpot: Array
    pages: Array

    def __len__(self) -> int:
        return len(self.deadline)

    def and_(self, others: Prompts) -> Prompts:
        """These, then `others`."""
        names = ("deadline", "tokens", "tpot", "pages")
        return Prompts(*(np.concatenate([getattr(self, name), getattr(others, name)]) for name in names))

    def at(self, rows: Order | Mask) -> Prompts:
        """Some of them, in that order."""
        return Prompts(self.deadline[rows], self.tokens[rows], self.tpot[rows], self.pages[rows])


NO_PROMPTS = Prompts(*(np.zeros(0),) * 4)


def largest_set(
    start: float,
    prompts: Prompts,
    tier: Order,
    forced: Mask,
    counts: Array,
    rate: Callable[[Array], Array],
    free: float,
) -> Mask:
    """The most new prompts that can be taken beside all `forced` ones, of equal sets the one that leaves the most.

    tier: [prompts] index into `counts`, the rows that decode at `start` by tier. rate(counts [..., tiers]): prompt
    tokens per second beside so many rows. free: pages for what is new. A taken prompt decodes from its deadline on.
    A forced prompt that is late in any case stays, and nobody may make it later.
    """
    deadline = np.minimum(prompts.deadline, start + NEVER)
    order = np.lexsort((~forced, deadline))
    stays = forced[order]
    new = order[~stays]
    chosen: Mask = np.zeros(len(prompts), dtype=bool)
    if not len(new):
        return chosen
    taken, strides = _cells(tuple(np.bincount(tier[new], minlength=len(counts)).tolist()))
    need, room = _units(prompts.pages, new, free)
    base = np.zeros((1 + len(order), len(counts)))  # rows that decode before each, and after the last
    base[0] = counts
    base[1:][stays, tier[order[stays]]] = 1.0
    base = np.add.accumulate(base, axis=0)
    speed = rate(base[:-1, None, :] + taken[None, :, :])  # [prompts, cells]
    due = deadline[order]
    gaps = due - np.concatenate(([start], due[:-1]))
    speed[:, 1:][speed[:, 1:] < 0] = -np.inf  # these rows alone are too many
    left = np.full((len(taken), room + 1), -np.inf)
    left[0, 0] = 0.0
    with np.errstate(invalid="ignore"):
        gained = np.where(gaps[:, None] > 0, gaps[:, None] * speed, np.where(np.isinf(speed), -np.inf, 0.0))
    took: list[np.ndarray] = []
    cost, first = prompts.tokens[order], 0
    for step in np.flatnonzero(~stays).tolist():
        row, tokens = int(order[step]), float(cost[step])
        left = _past(left, gained[first:step], cost[first:step]) + gained[step][:, None]
        first = step + 1
        stride, pages = strides[tier[row]], int(need[row])
        with_it = np.full_like(left, -np.inf)
        if pages <= room:
            with_it[stride:, pages:] = left[:-stride, : room + 1 - pages] - tokens
        with_it[(with_it < -EASE) | (taken[:, tier[row]] == 0)[:, None]] = -np.inf
        took.append(with_it > left)
        left = np.maximum(left, with_it)
    if not any(flags.any() for flags in took):
        return chosen
    left = _past(left, gained[first:], cost[first:])
    lasting = rate(base[-1] + taken) >= 0
    lasting[0] = True
    size = np.where(np.isfinite(left) & lasting[:, None], taken.sum(axis=1)[:, None], -1)
    size[0, 0] = max(0, int(size[0, 0]))
    best = np.flatnonzero(size == size.max())
    cell, used = divmod(int(best[np.argmax(left.flat[best])]), room + 1)
    for row, flags in zip(new[::-1].tolist(), reversed(took), strict=True):
        if flags[cell, used]:
            chosen[row] = True
            cell -= strides[tier[row]]
            used -= int(need[row])
    return chosen


@lru_cache(maxsize=256)
def _cells(most: tuple[int, ...]) -> tuple[np.ndarray, list[int]]:
    """All numbers of prompts that can be taken of tiers that have so many, [cells, tiers], and how many cells one more
    of a tier is away."""
    sizes = [1 + one for one in most]
    cells = np.indices(sizes).reshape(len(sizes), -1).T
    cells.flags.writeable = False
    return cells, [prod(sizes[one + 1 :]) for one in range(len(sizes))]


def _past(left: Array, gained: Array, cost: Array) -> Array:
    """What is left [cells, room] behind prompts that are forced in, in a row, all of which gain and cost. Added up one
    after the other, so that sums are those of a loop over them."""
    if not len(cost):
        return left
    steps = np.empty((*left.shape, 1 + 2 * len(cost)))  # the prompts last: numpy adds up along others 20 times slower
    steps[..., 0], steps[..., 1::2], steps[..., 2::2] = left, gained.T[:, None, :], -cost
    after = np.add.accumulate(steps, axis=-1)[..., 2::2]
    late = after < np.minimum(0.0, after[:1, :1]) - EASE
    result: Array = np.where(late.any(axis=-1), -np.inf, after[..., -1])
    return result


def _units(pages: Array, new: Order, free: float) -> tuple[Order, int]:
    """Memory that each prompt takes and that there is, in units; 0 where all that is new fits."""
    if pages[new].sum() <= free:
        return np.zeros(len(pages), dtype=np.intp), 0
    unit = max(1, ceil(max(0.0, free) / UNITS))
    return np.ceil(pages / unit).astype(np.intp), int(max(0.0, free) // unit)


@dataclass(frozen=True, slots=True)
class Standing:
    """What an instance has promised: rows that decode, and prompts that are not done. start: when it is free."""

    start: float
    tpot: Array  # of each decoding row
    context: Array  # likewise
    prompts: Prompts
    free: float  # pages

    def load(self) -> Load:
        rows = len(self.context)
        if not rows:
            return Load()
        return Load(decode=rows, longest=int(self.context.max()), context=int(self.context.sum()))


def admitted(standing: Standing, new: Prompts, terms: Terms) -> Mask:
    """Which of some new prompts can be promised their SLOs, beside all that was promised. [new]

    Decided on MOST at a time, by deadline, each lot beside those before it.
    """
    result: Mask = np.zeros(len(new), dtype=bool)
    order = np.argsort(new.deadline, kind="stable")
    for first in range(0, len(order), MOST):
        lot = order[first : first + MOST]
        chosen = _decide(standing, new.at(lot), terms)
        result[lot] = chosen
        if first + MOST >= len(order):
            break
        kept = new.at(lot[chosen])
        standing = Standing(
            standing.start,
            standing.tpot,
            standing.context,
            standing.prompts.and_(kept),
            standing.free - float(kept.pages.sum()),
        )
    return result


def _decide(standing: Standing, new: Prompts, terms: Terms) -> Mask:
    prompts = standing.prompts.and_(new)
    tpot = tiers(np.concatenate((standing.tpot, prompts.tpot)))
    counts = np.bincount(tier_of(standing.tpot, tpot), minlength=len(tpot)).astype(float)
    forced = np.arange(len(prompts)) < len(standing.prompts)
    supply = Supply(terms, tpot.tolist(), standing.load(), len(standing.tpot), float(prompts.tokens.mean()))
    tier = tier_of(prompts.tpot, tpot)
    return largest_set(standing.start, prompts, tier, forced, counts, supply.rate, standing.free)[
        len(standing.prompts) :
    ]


def tiers(tpot: Array) -> Array:
    """Ascending distinct tpots, at most TIERS of them."""
    values = np.sort(np.minimum(tpot, NEVER))
    distinct: Array = values[np.concatenate(([True], values[1:] != values[:-1]))[: len(values)]]
    return distinct if len(distinct) <= TIERS else distinct[np.arange(TIERS) * len(distinct) // TIERS]


def tier_of(tpot: Array, among: Array) -> Order:
    """The loosest tier that keeps each tpot: an index into `among`, which `tiers` made of these and others."""
    result: Order = np.searchsorted(among, np.minimum(tpot, NEVER), side="right") - 1
    return result


def demand(perf: PerfModel, tokens: Array, context: Array, chunk: int) -> Array:
    """Prompt tokens in a step's currency: those to compute, and as many as their attention to what comes before and
    to each other takes in time."""
    size = min(chunk, 2048)
    probes = np.concatenate(([size / 2, size], tokens)), np.concatenate(([0.0, 0.0], context))
    seconds = perf.prefill_times(*probes, chunk)
    half, whole = seconds[:2].tolist()
    each = (whole - half) / (size / 2)
    if not each > 0:
        return tokens
    fixed, seconds = max(0.0, whole - size * each), seconds[2:]
    extra = (seconds - np.ceil(tokens / chunk) * fixed) / each - tokens
    result: Array = tokens + np.maximum(0.0, extra)
    return result


# from a view


def terms_of(
    view: View, *, block: float, draft: int, margin: float, fixed: float | None = None, caution: float = 1.0
) -> Terms:
    """block: of the median ttft that anybody here was promised, the seconds of a step in which nobody decodes: so
    long may a newcomer have to wait."""
    ttft = np.concatenate([rows.ttft for rows in (view.prefill, view.decode)])
    idle = block * min(_median(ttft), NEVER) if len(ttft) else NEVER
    return Terms(view.perf, view.limits.tokens, idle, view.acceptance, draft, margin, fixed, caution)


def _median(values: Array) -> float:
    """np.median at a third of its time."""
    middle = len(values) // 2
    if len(values) % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1].tolist()
    return 0.5 * float(low + high)


def prompts_of(view: View, order: Order, output: int) -> Prompts:
    """Some rows of view.prefill. Each is taken to hold `output` tokens beyond its prompt. On a prefill instance
    nobody decodes here."""
    rows = view.prefill
    tokens = demand(view.perf, rows.remaining[order], rows.context[order], view.limits.tokens)
    tpot: Array = np.full(len(order), NEVER) if view.role is Role.PREFILL else rows.tightest[order]
    more = rows.remaining[order] * (rows.running[order] == 0) + output  # who runs holds the pages of its prompt
    return Prompts(rows.deadline[order], tokens, tpot, blocks(more, view))


def blocks(tokens: Array, view: View) -> Array:
    """Pages that so many tokens fill or begin."""
    result: Array = np.ceil(tokens / view.limits.page_size)
    return result


def standing_of(view: View, prompts: Prompts, output: int) -> Standing:
    """What an instance has promised: every row of view.decode that is not best effort, and these prompts.

    Pages that best effort holds count as free. Each row is taken to generate `output` tokens in all.
    """
    rows = view.decode
    mine = np.flatnonzero(rows.best_effort == 0)
    grow = np.maximum(0.0, output - (rows.context - rows.length)[mine]).sum() / view.limits.page_size
    free = view.free_pages + best_effort_pages(view) - float(grow) - float(prompts.pages.sum())
    if view.role is Role.PREFILL:
        return Standing(view.start, np.zeros(0), np.zeros(0), prompts, free)
    return Standing(view.start, rows.tightest[mine], rows.context[mine], prompts, free)


def best_effort_pages(view: View) -> float:
    """Pages that best effort holds: others may take them."""
    size = view.limits.page_size

    def held(rows: Rows) -> float:
        return (
            float(np.ceil(rows.context * rows.best_effort * rows.running / size).sum()) if _last_is_best(rows) else 0.0
        )

    return held(view.prefill) + held(view.decode)


def best_effort_slots(view: View) -> int:
    """Slots that best effort holds."""
    tables = (rows for rows in (view.prefill, view.decode) if _last_is_best(rows))
    return int(sum((rows.best_effort * rows.running).sum() for rows in tables))


def _last_is_best(rows: Rows) -> bool:
    """Whether a table has best effort: it comes last."""
    return len(rows) > 0 and rows.best_effort[-1] > 0
