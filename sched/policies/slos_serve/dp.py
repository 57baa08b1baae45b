"""The dynamic program of SLOs-Serve (arXiv 2504.08784, section 3.2.1 and appendix C): which SLOs can be promised.

    pb[i, n] = max_j { pb[j, n - 1] - p_i + PB*(pDDL_i - pDDL_j, n - 1) },  pDDL_j <= pDDL_i in index order

pb is the budget of prompt tokens left at the deadline of prompt i if n prompts up to it are taken, i
being the last. It must never be negative. PB* is linear in time while the number of decodes is constant,
so the state does not need the last prompt: what is left is carried from deadline to deadline, whether or
not the prompt there is taken. All prompts count, including those promised before, which are forced in.
n is a vector with one count per TPOT tier. If memory could run out, the pages used are part of the state,
too. If new prompts differ in value (v_i), n has one count per tier and value. The set with the largest
sum of values is found exactly; with equal values it is the largest set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, prod

import numpy as np

from ...api.perf import Array
from ...api.policy import Order
from ...feasibility import Mask
from .commitments import Commitments, Prompts
from .speculation import NEVER, PrefillSupply, StepCosts

UNITS = 16  # units of memory in the state
TIERS = 4  # distinct TPOTs; if there are more, each is taken as the next tighter of this many
SPAN = 20  # priorities beyond +-SPAN have the value of +-SPAN
MOST = 16  # new prompts decided on at a time
CELLS = 640  # bound of the state at a time: MOST prompts of equal value in TIERS tiers have 625 cells
FEW = 4  # up to this many new prompts, all sets are evaluated at once if possible
EASE = 1e-6  # tokens: rounding of sums must not decide


def largest_set(
    start: float,
    prompts: Prompts,
    tier: Order,
    forced: Mask,
    counts: Array,
    rate: Callable[[Array], Array],
    free: float,
    value: Array | None = None,
) -> Mask:
    """Return the most valuable set of new prompts that fits beside all `forced` ones.

    Of equally valuable sets it is the one that leaves the most prompt tokens. A taken prompt decodes from
    its deadline on. A forced prompt that is late in any case stays, and no new prompt may make it later.

    tier: [prompts] index into `counts`, the running decodes at `start` by tier.
    rate(counts [..., tiers]): prompt tokens per second beside that many decodes.
    free: pages for new prompts.
    value: [prompts] of keeping each promise, more than 0. None: all equal, which gives the largest set.
    """
    deadline = np.minimum(prompts.deadline, start + NEVER)
    order = np.lexsort((~forced, deadline))
    stays = forced[order]
    new = order[~stays]
    chosen: Mask = np.zeros(len(prompts), dtype=bool)
    if not len(new):
        return chosen
    kind, kinds = _kinds(tier[new], None if value is None else value[new])
    taken, strides = _cells(tuple(np.bincount(kind, minlength=len(kinds)).tolist()))
    decoding = np.zeros((len(taken), len(counts)))  # [cells, tiers] decodes from the taken prompts
    for at, (of, _) in enumerate(kinds):
        decoding[:, of] += taken[:, at]
    worth = taken @ np.array([each for _, each in kinds])
    need, room = _units(prompts.pages, new, free)
    base = np.zeros((1 + len(order), len(counts)))  # decodes before each prompt, and after the last
    base[0] = counts
    base[1:][stays, tier[order[stays]]] = 1.0
    base = np.add.accumulate(base, axis=0)
    speed = rate(base[:-1, None, :] + decoding[None, :, :])  # [prompts, cells]
    due = np.maximum(deadline[order], start)  # no time is left before a deadline in the past
    gaps = due - np.concatenate(([start], due[:-1]))
    speed[:, 1:][speed[:, 1:] < 0] = -np.inf  # the decodes of this cell alone are too many
    left = np.full((len(taken), room + 1), -np.inf)
    left[0, 0] = 0.0
    with np.errstate(invalid="ignore"):
        gained = np.where(gaps[:, None] > 0, gaps[:, None] * speed, np.where(np.isinf(speed), -np.inf, 0.0))
    took: list[np.ndarray] = []
    cost, first = prompts.tokens[order], 0
    for step, what in zip(np.flatnonzero(~stays).tolist(), kind.tolist(), strict=True):
        row, tokens = int(order[step]), float(cost[step])
        left = _past(left, gained[first:step], cost[first:step]) + gained[step][:, None]
        first = step + 1
        stride, pages = strides[what], int(need[row])
        with_it = np.full_like(left, -np.inf)
        if pages <= room:
            with_it[stride:, pages:] = left[:-stride, : room + 1 - pages] - tokens
        with_it[(with_it < -EASE) | (taken[:, what] == 0)[:, None]] = -np.inf
        took.append(with_it > left)
        left = np.maximum(left, with_it)
    if not any(flags.any() for flags in took):
        return chosen
    left = _past(left, gained[first:], cost[first:])
    lasting = rate(base[-1] + decoding) >= 0
    lasting[0] = True
    sums = np.where(np.isfinite(left) & lasting[:, None], worth[:, None], -1.0)
    sums[0, 0] = max(0.0, float(sums[0, 0]))
    best = np.flatnonzero(sums == sums.max())
    cell, used = divmod(int(best[np.argmax(left.flat[best])]), room + 1)
    for row, what, flags in zip(new[::-1].tolist(), kind[::-1].tolist(), reversed(took), strict=True):
        if flags[cell, used]:
            chosen[row] = True
            cell -= strides[what]
            used -= int(need[row])
    return chosen


def _kinds(tier: Order, value: Array | None) -> tuple[Order, list[tuple[int, float]]]:
    """Return the kind of each new prompt, and the kinds in ascending order: pairs of tier and value."""
    values = [1.0] * len(tier) if value is None else value.tolist()
    pairs = list(zip(tier.tolist(), values, strict=True))
    kinds = sorted(set(pairs))
    place = {pair: at for at, pair in enumerate(kinds)}
    return np.array([place[pair] for pair in pairs], dtype=np.intp), kinds


@lru_cache(maxsize=256)
def _cells(most: tuple[int, ...]) -> tuple[np.ndarray, list[int]]:
    """List all counts of prompts taken per kind, given the most of each.

    Returns the counts [cells, kinds], and for each kind the distance in cells to one more prompt.
    """
    sizes = [1 + count for count in most]
    cells = np.indices(sizes).reshape(len(sizes), -1).T
    cells.flags.writeable = False
    return cells, [prod(sizes[kind + 1 :]) for kind in range(len(sizes))]


def _past(left: Array, gained: Array, cost: Array) -> Array:
    """Return what is left [cells, room] after a run of forced prompts, each of which gains and costs.

    Terms are added one by one, so that the sums equal those of a loop to the last bit.
    """
    if not len(cost):
        return left
    steps = np.empty((*left.shape, 1 + 2 * len(cost)))  # prompts on the last axis: numpy is 20 times slower on others
    steps[..., 0], steps[..., 1::2], steps[..., 2::2] = left, gained.T[:, None, :], -cost
    after = np.add.accumulate(steps, axis=-1)[..., 2::2]
    late = after < np.minimum(0.0, after[:1, :1]) - EASE
    result: Array = np.where(late.any(axis=-1), -np.inf, after[..., -1])
    return result


def _units(pages: Array, new: Order, free: float) -> tuple[Order, int]:
    """Convert the pages of each prompt and the free ones to units. 0 units if all new prompts fit."""
    if pages[new].sum() <= free:
        return np.zeros(len(pages), dtype=np.intp), 0
    unit = max(1, ceil(max(0.0, free) / UNITS))
    return np.ceil(pages / unit).astype(np.intp), int(max(0.0, free) // unit)


def values(priorities: Sequence[int]) -> Array:
    """Return the value of keeping each promise (v_i of section 3.2.1): 2 to the power of -priority.

    One request is worth two of the next priority; lower numbers are more important, as in vLLM.
    Priorities are clipped to +-SPAN, so that sums of values are exact.
    """
    result: Array = np.exp2(-np.clip(np.array(priorities, dtype=float), -SPAN, SPAN))
    return result


def admitted(
    standing: Commitments,
    new: Prompts,
    terms: StepCosts,
    value: Array | None = None,
    alone: Callable[[], Mask] | None = None,
) -> Mask:
    """Return which new prompts can be promised their SLOs beside everything promised so far.

    value: [new] of keeping each promise. None: all equal.
    alone: computes exactly which prompts an idle server could serve in time, each by itself. If nothing
        is promised yet and the program, which adds up rates and keeps a margin, takes no prompt, the most
        valuable of these with the least to compute is taken, so that an idle server never declines a
        request that it can serve.
    """
    if value is not None and (value == value[:1]).all():
        value = None
    result = _in_lots(standing, new, terms, value)
    if alone is not None and not len(standing.tpot) and not len(standing.prompts) and not result.any():
        can = np.flatnonzero(alone())
        if len(can):
            worth = np.zeros(len(can)) if value is None else value[can]
            result = np.arange(len(new)) == can[np.lexsort((new.tokens[can], -worth))[0]]
    return result


def _in_lots(standing: Commitments, new: Prompts, terms: StepCosts, value: Array | None) -> Mask:
    """As `admitted`, without `alone`.

    Decides on up to MOST prompts at a time, or fewer if their kinds exceed CELLS: by value, then by
    deadline, each lot beside those before it.
    """
    if 0 < len(new) <= MOST and value is None:
        return _decide(standing, new, terms, None)
    result: Mask = np.zeros(len(new), dtype=bool)
    order = new.deadline.argsort(kind="stable") if value is None else np.lexsort((new.deadline, -value))
    while len(order):
        lot = order[: _lot(new, order, value)]
        order = order[len(lot) :]
        chosen = _decide(standing, new.at(lot), terms, None if value is None else value[lot])
        result[lot] = chosen
        kept = new.at(lot[chosen])
        free = standing.free - float(kept.pages.sum())
        standing = replace(standing, prompts=standing.prompts.and_(kept), free=free)
    return result


def _lot(new: Prompts, order: Order, value: Array | None) -> int:
    """Return how many of the first prompts of `order` to decide on at a time."""
    if value is None:
        return MOST
    kinds: dict[tuple[float, float], int] = {}
    cells = 1.0
    for count, row in enumerate(order[:MOST].tolist()):
        kind = float(new.tpot[row]), float(value[row])
        had = kinds.get(kind, 0)
        kinds[kind] = had + 1
        cells *= (had + 2) / (had + 1)
        if cells > CELLS + 0.5:
            return count
    return min(MOST, len(order))


def _decide(standing: Commitments, new: Prompts, terms: StepCosts, value: Array | None) -> Mask:
    before, rows = len(standing.prompts), len(standing.tpot)
    prompts = standing.prompts.and_(new)
    every = np.concatenate((standing.tpot, prompts.tpot))
    among = tiers(every)
    tier = tier_of(every, among)
    counts = np.bincount(tier[:rows], minlength=len(among)).astype(float)
    each = float(np.add.reduce(prompts.tokens)) / len(prompts)
    supply = PrefillSupply(terms, among.tolist(), standing.load, rows, each)
    if supply.uniform(counts):
        if _hopeless(standing, new, supply.most(counts)):
            return np.zeros(len(new), dtype=bool)
        if np.add.reduce(new.pages) <= standing.free:
            sets = _sets(len(new))
            possible, left = _followed(standing.start, prompts, tier[rows:], before, counts, supply, sets)
            if possible[-1]:
                return np.ones(len(new), dtype=bool)
            if len(new) <= FEW:
                worth = np.add.reduce(sets, axis=1) if value is None else sets @ value
                sums = np.where(possible, worth, -1)
                best = np.flatnonzero(sums == np.maximum.reduce(sums))
                chosen: Mask = sets[best[left[best].argmax()]]
                return chosen
    forced = np.arange(len(prompts)) < before
    values = None if value is None else np.concatenate((np.ones(before), value))
    return largest_set(standing.start, prompts, tier[rows:], forced, counts, supply.rate, standing.free, values)[
        before:
    ]


def _hopeless(standing: Commitments, new: Prompts, rate: float) -> bool:
    """Return whether every new prompt would be late by more than a token.

    This is a bound: only prompts that are due before it count, at `rate`, the most prompt tokens per
    second that steps ever leave.
    """
    own, (due, owed) = np.minimum(new.deadline, standing.start + NEVER), standing.due
    since = min(standing.start, float(np.minimum.reduce(own)), *due[:1].tolist())
    before = owed[due.searchsorted(own, side="right")]
    return bool((before + new.tokens > max(0.0, rate) * (own - since) + 1.0).all())


@lru_cache(maxsize=MOST)
def _sets(new: int) -> Mask:
    """List sets of new prompts [sets, new], from the empty set to all of them.

    Up to FEW prompts, these are all sets, smaller ones first and then those with the first prompts.
    Beyond, only the empty and the full set.
    """
    every = product((True, False), repeat=new) if new <= FEW else ((False,) * new, (True,) * new)
    sets: Mask = np.array(sorted(every, key=sum))
    sets.flags.writeable = False
    return sets


def _followed(
    start: float, prompts: Prompts, tier: Order, forced: int, counts: Array, supply: PrefillSupply, sets: Mask
) -> tuple[Mask, Array]:
    """Return which sets of the prompts behind the first `forced` ones are possible, and what each leaves.

    Equal to `largest_set` restricted to these sets, if memory does not matter and steps are uniform.
    """
    deadline = np.minimum(prompts.deadline, start + NEVER)
    order = deadline.argsort(kind="stable")
    due, stays, weight = np.maximum(deadline[order], start), order < forced, supply.weights[tier[order]]
    taken = np.ones((len(sets), len(order)), dtype=bool)
    taken[:, forced:] = sets
    taken = taken[:, order]
    tokens = np.empty((len(sets), 1 + len(order)))  # decoded per step before each prompt, and after the last
    tokens[:, 0], tokens[:, 1:] = counts @ supply.weights, weight * taken
    tokens = np.add.accumulate(tokens, axis=1)
    last, rows = bool(stays[-1]), float(np.add.reduce(counts)) + len(order)
    most = float(tokens[-1, -1]), rows
    speed = supply.speed(tokens[:, :-1], counts, (float(tokens[-1, -2]), rows - 1) if last else most)
    gaps = due.copy()
    gaps[0] -= start
    gaps[1:] -= due[:-1]
    left = np.add.accumulate(np.maximum(gaps, 0.0) * speed - prompts.tokens[order] * taken, axis=1)
    late = (left < np.minimum(0.0, left[0]) * stays - EASE) & taken
    if speed[-1, -1] < 0:  # the least speed: after the first prompt of a set, the decodes alone may be too many
        late[:, 1:] |= (speed[:, 1:] < 0) & np.logical_or.accumulate(taken & ~stays, axis=1)[:, :-1]
    possible: Mask = ~late.any(axis=1)
    if not supply.lasts(*most):
        before = counts + np.bincount(tier[:forced], minlength=len(counts))
        possible &= supply.speed(tokens[:, -1], before, most) >= 0
    possible[0] = True
    return possible, left[:, -1]


def tiers(tpot: Array) -> Array:
    """Return the distinct TPOTs in ascending order, at most TIERS of them."""
    values = np.sort(np.minimum(tpot, NEVER))
    first = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    distinct: Array = values[first]
    return distinct if len(distinct) <= TIERS else distinct[np.arange(TIERS) * len(distinct) // TIERS]


def tier_of(tpot: Array, among: Array) -> Order:
    """Return the loosest tier that keeps each TPOT, as an index into `among` (from `tiers`, over these and others)."""
    result: Order = np.searchsorted(among, np.minimum(tpot, NEVER), side="right") - 1
    return result
