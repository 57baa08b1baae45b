"""Feasibility of deadlines: remaining work, the on-time set, and the time that decodes leave in a step.

Shared by policies, routers and admission. Pure functions of a View and its numpy columns, in
seconds and tokens. Parts that take more than linear time only look at requests that could be on
time alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, isfinite
from typing import Any, cast

import numpy as np

from .api.perf import Array, Load, PerfModel
from .api.policy import Order, QueueView, View
from .api.request import Request, RequestView, State

GRID = 64  # tokens: chunks in mixed steps are multiples of it
STAIR = 4  # ratio of average to marginal cost per token that indicates a padded step
MARGIN = 0.97  # share of the time to a deadline that a step may be predicted to take
BEHIND = 8.0  # tpot: a row later than this no longer shortens the steps of the others
NO_ROWS: Order = np.arange(0)
CATCH_UP = 100.0  # tokens: a row that needs more to catch up is assumed to end first
ROUNDING = 1e-9  # share of a step: tolerance for sums of floats
PATIENCE = 4.0  # tpot or steps, whichever is longer, that a row may be left out before it joins again
YOUNG = 4  # rows checked one by one before all others at once
JOINING = 4  # one in this many of the rows left out too long joins each step
MANY = 512  # jobs from which on `_largest_of_many` is used
BINS = 64  # bins of jobs by their seconds
GUESSES = 4  # guesses of how many bins fit, before bisection
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Cost = Callable[[Load], float]  # of a step: predicted seconds, or tokens


def remaining_work(view: View, rows: QueueView, count: int | None = None) -> Array:
    """Return the seconds to prefill the remaining tokens of each request, alone, in chunks of `limits.tokens`.

    Expected prefix-cache hits of waiting requests cost nothing. Covers the first `count` rows, or
    all.
    """
    remaining = rows.remaining[:count]
    hit = np.minimum(rows.hit[:count], remaining - 1)  # the last known token is always computed
    return view.perf.prefill_times(remaining - hit, rows.context[:count] + hit, view.limits.tokens)


def prompt_time(perf: PerfModel, tokens: float, context: float, chunk: int) -> float:
    """Return the seconds to prefill `tokens` after `context` alone, in steps of `chunk` tokens."""
    return float(perf.prefill_times(np.array([float(tokens)]), np.array([float(context)]), chunk)[0])


def rest_of_prompt(perf: PerfModel, request: Request, chunk: int) -> float:
    """Return the seconds to prefill what is left of a prompt alone; its expected prefix hit costs nothing."""
    hit = min(request.hit, request.remaining - 1) if request.state is State.WAITING else 0
    return prompt_time(perf, request.remaining - hit, request.context + hit, chunk)


def left_behind(request: RequestView) -> int:
    """Return the prompt tokens of a request in a started step that this step does not compute."""
    return 0 if request.generated and request.remaining == 1 else request.remaining


def on_time_set(start: float, deadline: Array, work: Array, weight: Array | None = None) -> Mask:
    """Return the largest set of jobs that one server, free at `start`, can finish by their deadlines.

    This is the Moore-Hodgson algorithm: take jobs by deadline, and whenever the set is late, remove
    the job with the most work. Ties are broken by row, so that equal inputs give equal sets.

    weight: what each job counts. The job with the most work per weight is removed then, which is a heuristic:
    the set of the largest weight is that of a knapsack.
    """
    chosen: Mask = np.zeros(len(deadline), dtype=bool)
    alone = np.flatnonzero(start + work <= deadline)
    if not len(alone):
        return chosen
    order = alone[np.argsort(deadline[alone], kind="stable")]
    chosen[order] = True
    due, seconds = deadline[order], work[order]
    ends = np.add.accumulate(np.concatenate(([start], seconds)))
    late = ends[1:] > due
    first = int(late.argmax())
    if not late[first]:
        return chosen
    if weight is None and len(order) >= MANY:
        chosen[order] = _largest_of_many(start, due, seconds, order)
        return chosen
    latest = alone[::-1]
    cost = work if weight is None else work / weight
    most = latest[np.argsort(-cost[latest], kind="stable")]  # those removed first, ties by later row
    rank = np.empty(len(deadline), dtype=np.intp)
    rank[most] = np.arange(len(most))
    ranks, seconds_of = rank[order].tolist(), work[most].tolist()
    heap = ranks[:first]
    heapify(heap)
    at, dropped = float(ends[first]), []
    for job, limit in zip(ranks[first:], due[first:].tolist(), strict=True):
        heappush(heap, job)
        at += seconds_of[job]
        while heap and at > limit:
            dropped.append(heappop(heap))
            at -= seconds_of[dropped[-1]]
    chosen[most[dropped]] = False
    return chosen


def _largest_of_many(start: float, due: Array, seconds: Array, rows: Order) -> Mask:
    """Return the `on_time_set` of many jobs, given in order of deadline.

    Whenever a set is late its longest job is removed, so whether a job stays does not depend on
    longer jobs. Jobs are sorted into bins by seconds. All jobs of the first bins are kept, for as
    many bins as are on time together. Jobs of the next bin, and then of the others, are added if
    they fit. Only these are examined one by one.
    """
    least, span = float(seconds.min()), float(seconds.max() - seconds.min())
    bins = ((seconds - least) * ((BINS - 1) / span if span else 0.0)).astype(np.intp)
    total = np.add.accumulate(np.bincount(bins, seconds, BINS))
    low, spare = 0, due[-1] - start
    for turn in count():
        guess = int(np.searchsorted(total, spare, side="right"))
        low = guess if not turn else min(low - 1, guess) if turn < GUESSES else low // 2
        chosen: Mask = bins < low
        ends = start + np.add.accumulate(np.where(chosen, seconds, 0.0))
        late = float((ends - due).max())
        if late <= 0.0 or not low:
            break
        spare = float(total[low - 1]) - late
    chosen = chosen | _joining(due - ends, seconds, rows, bins == low)
    ends = start + np.add.accumulate(np.where(chosen, seconds, 0.0))
    return chosen | _joining(due - ends, seconds, rows, bins > low)


def _joining(slack: Array, seconds: Array, rows: Order, able: Mask) -> Mask:
    """Return which of the `able` jobs join others that leave this `slack` at the end of each job.

    Selects as `on_time_set` does. Jobs that do not fit alone are removed first: no on-time set
    contains them, and they do not change which of the largest sets has the least work.
    """
    joins: Mask = np.zeros(len(slack), dtype=bool)
    left = np.flatnonzero(able)
    if not len(left):
        return joins
    limits = np.minimum.reduceat(slack, left)  # limit on the added work, up to the next of these jobs
    fits = np.flatnonzero(seconds[left] <= np.minimum.accumulate(limits[::-1])[::-1])
    if not len(fits):
        return joins
    left, limits = left[fits], np.minimum.reduceat(limits, fits)
    most = np.lexsort((-rows[left], -seconds[left]))  # most work first, ties by later row
    rank = np.empty(len(left), dtype=np.intp)
    rank[most] = np.arange(len(left))
    weights, heap, dropped, extra = seconds[left[most]].tolist(), list[int](), [], 0.0
    for job, limit in zip(rank.tolist(), limits.tolist(), strict=True):
        heappush(heap, job)
        extra += weights[job]
        while heap and extra > limit:
            dropped.append(heappop(heap))
            extra -= weights[dropped[-1]]
    joins[left] = True
    joins[left[most[dropped]]] = False
    return joins


def decode_load(rows: QueueView) -> Load:
    """Return the load of a step that decodes one token of every row."""
    return load_of(rows.context)


def load_of(context: Array) -> Load:
    """Return the load of a step that decodes one token for each of these contexts."""
    return joined(Load(), context)


def joined(load: Load, context: Array, tokens: int | None = None) -> Load:
    """Return `load` with one more running decode for each of these contexts.

    Each decodes one token, unless `tokens` gives the total.
    """
    if not len(context):
        return load
    return load.add_rows(tokens or len(context), int(np.maximum.reduce(context)), int(np.add.reduce(context)))


def with_prompt(load: Load, request: RequestView, hit: int) -> Load:
    """Return `load` with all remaining tokens of a prompt, of which `hit` are in the prefix cache."""
    hit = min(hit, request.remaining - 1)
    return load.add_chunk(request.remaining - hit, request.context + hit)


def fitting(cost: Cost, load: Load, context: Array, bound: float, tokens: Sequence[int] | None = None) -> int:
    """Return how many rows, in order, can join a step of `load` at a cost of at most `bound`.

    `tokens` gives the cumulative tokens to decode up to each row; by default one per row. The cost
    must not decrease with more rows.
    """
    count = len(context)
    verified = range(1, count + 1) if tokens is None else tokens
    if not count or cost(joined(load, context, verified[-1])) <= bound:
        return count
    longest, total = np.maximum.accumulate(context).tolist(), np.add.accumulate(context).tolist()

    def seconds(row: int) -> float:
        return cost(load.add_rows(verified[row], int(longest[row]), int(total[row])))

    return bisect_right(range(count - 1), bound, key=seconds)


def largest_chunk(cost: Cost, load: Load, done: int, left: int, bound: float, grid: int = GRID) -> int:
    """Return the largest chunk of a prompt that can join a step of `load` at a cost of at most `bound`.

    `done` tokens of the prompt are computed and `left` remain. The chunk is a multiple of `grid`,
    all of `left`, or as many tokens as fill a padded step; 0 if none fits. The cost must not
    decrease with more tokens.
    """
    if left < 1:
        return 0
    long = cost(load.add_chunk(left, done))
    if long <= bound:
        return left
    size = min(grid, left)
    short = cost(load.add_chunk(size, done))
    if short > bound:
        least = cost(load.add_chunk(1, done)) if size > 1 else short
        filled = _filled(cost, load, done, 1, size, least, short, bound) if least <= bound else 0
        return filled if filled > 1 else 0
    low, high = 1, -(-left // grid)  # in units of `grid`: low fits, high does not
    for turn in count():
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if turn % 4 < 3:  # interpolate, because the cost is nearly linear in the tokens
            share = (bound - short) / (long - short)
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        between = cost(load.add_chunk(middle * grid, done))
        if between <= bound:
            low, short = middle, between
        else:
            high, long = middle, between
    return _filled(cost, load, done, low * grid, min(high * grid, left), short, long, bound)


def _filled(cost: Cost, load: Load, done: int, low: int, high: int, least: float, long: float, bound: float) -> int:
    """Return the most tokens, from `low` on, that cost at most `bound`, if they fill a padded step.

    `low` costs `least`, which is within the bound, and `high` costs `long`, which is not. Returns
    `low` unless the cost jumps between them, that is, the next token costs far less than the
    average one.
    """
    if high - low > 1 and STAIR * (high - low) * (cost(load.add_chunk(low + 1, done)) - least) < long - least:
        tokens = range(low, high)
        return low - 1 + bisect_right(tokens, bound, key=lambda size: cost(load.add_chunk(size, done)))
    return low


def chunk_times(perf: PerfModel, load: Load, tokens: int, context: Array) -> Array:
    """Predict the seconds of a step of `load` plus a chunk of `tokens` prompt tokens, elementwise.

    `context` is the number of computed tokens before the chunk.
    """
    seconds: Any = perf.step_time(load.add_chunk(tokens, cast(Any, context)))
    result: Array = np.broadcast_to(seconds, context.shape)
    return result


def paces(rows: QueueView) -> Array:
    """Return the longest time per token that keeps each row's objectives: the lesser of its tpot and its tbt.

    In seconds; inf without an objective. Rows of best effort are left out.
    """
    return np.minimum(promised(rows, rows.tpot), promised(rows, rows.tbt))


def tightest_pace(rows: QueueView) -> float:
    """Return the least of `paces`, in seconds; inf if there are none."""
    return float(np.minimum.reduce(paces(rows), initial=inf))


def promised(rows: QueueView, column: Array) -> Array:
    """Return a column without best-effort rows."""
    return column[: rows.standard]


def held_by_best_effort(view: View, whole: Callable[[Array], Array]) -> tuple[float, int]:
    """Return the pages and slots that best effort holds, which others may take.

    `whole` rounds numbers of pages up.
    """
    pages, slots = 0.0, 0
    for rows in (view.prefill, view.decode):
        count = rows.standard
        if count < len(rows):
            running = rows.running[count:] > 0
            pages += float(whole(rows.context[count:][running] / view.limits.page_size).sum())
            slots += int(np.count_nonzero(running))
    return pages, slots


def deadlines(rows: QueueView) -> Array:
    """Return the deadlines of the next tokens; -inf for best effort, which has no deadline to keep."""
    return rows.deadline if rows.standard == len(rows) else np.where(rows.best_effort > 0, -inf, rows.deadline)


def tightest_tpot(rows: QueueView) -> float:
    """Return the least tpot of rows that are not best effort, in seconds; inf if there are none."""
    return float(np.minimum.reduce(promised(rows, rows.tpot), initial=inf))


def tightest_tbt(rows: QueueView) -> float:
    """Return the least tbt of rows that are not best effort, in seconds; inf if there are none."""
    return float(np.minimum.reduce(promised(rows, rows.tbt), initial=inf))


SHARE = 0.95  # of the tightest TPOT: how long a mixed step of `unified` may be; see `mixed_bound`
PRESSED = 1.1  # times a step that decodes all rows: the least bound of a mixed step, so that prompts progress


def mixed_bound(view: View, gap: float, share: float, stretch: float = 1.0, cushion: float = 0.0) -> float:
    """Return the longest time, in seconds, of a step that decodes all rows and prefills prompts too.

    It is `share` of the tightest tpot, because a request that joins waits for the running step. It
    grows up to `stretch` of the tpot while every row is ahead of its deadline by more than that
    plus `cushion` tpot. It is at most `gap` of the tightest tbt.
    """
    rows = view.decode
    tpot, tbt = tightest_tpot(rows), tightest_tbt(rows)
    longest = gap * tbt if isfinite(tbt) else inf
    if not isfinite(tpot):
        return longest
    slack = float(np.minimum.reduce(promised(rows, rows.deadline))) - view.start
    return min(longest, max(share * tpot, min(slack - cushion * tpot, stretch * tpot)))


def joiners_bound(view: View, alone: float, few: int) -> float:
    """Return the longest step time, in seconds, with which rows that joined late catch up.

    A row that waited for a long step when it joined has no slack, and may have few tokens left.
    Each row that decoded at most `few` tokens must be on time again with one of its next `few`
    tokens: the first that allows for steps of all rows, which take `alone` seconds. All steps until
    then take equally long. Returns inf if no row needs the bound or none can be helped.
    """
    rows = view.decode
    joined_lately = promised(rows, rows.context - rows.length) <= few
    fresh = np.flatnonzero(joined_lately & np.isfinite(promised(rows, rows.tpot)))
    if not len(fresh):
        return inf
    slack, tpot, more = rows.deadline[fresh] - view.start, rows.tpot[fresh], np.arange(few)[:, None]
    each = MARGIN * (slack + more * tpot) / (more + 1)  # [few, fresh]: time per step if `more` tokens come before it
    able = each >= alone
    first = each[able.argmax(axis=0), np.arange(len(fresh))]
    return float(np.minimum.reduce(first, initial=inf, where=np.logical_or.reduce(able, axis=0)))


def late_joiners(view: View, lately: int) -> Order:
    """Return rows with one token that would be late with the next two in steps of all rows, but not in one of theirs.

    They joined during a long step, and a short answer has no later tokens to catch up with. Returns no rows if
    another row would become late, or if the other steps leave no time for such ones, as often as rows joined within
    the last `lately` tokens.
    """
    rows = view.decode
    decoded = promised(rows, rows.context - rows.length)
    fresh = np.flatnonzero(decoded <= 1)
    if not len(fresh) or len(fresh) == len(rows):
        return NO_ROWS
    slack = promised(rows, rows.deadline) - view.start
    every = view.perf.step_time(decode_load(rows))
    late = fresh[MARGIN * (slack[fresh] + rows.tpot[fresh]) < 2.0 * every]
    if not len(late):
        return NO_ROWS
    alone = view.perf.step_time(load_of(rows.context[late]))
    if np.count_nonzero(decoded <= lately) * alone > lately * (tightest_pace(rows) - every) * len(late):
        return NO_ROWS
    late = late[slack[late] + rows.tpot[late] >= alone + every]  # on time with this token or the next one
    on_time = (slack >= every) & (slack < alone + every)
    on_time[late] = False
    return NO_ROWS if on_time.any() else late


def keeps_objectives(rows: QueueView, start: float, seconds: float) -> bool:
    """Return whether some row can keep its objectives in steps of `seconds`.

    Its first token must have been on time, and it must be on time with such steps, now or after
    catching up. If no row can, policies do not leave rows out of a step or shorten its chunks,
    since that would gain nothing. Best effort and rows without objectives do not count.
    """
    count = rows.standard
    if not count:
        return False
    seconds *= 1.0 - ROUNDING
    deadline, tpot, tbt = rows.deadline, rows.tpot, rows.tbt
    for row in range(count - 1, max(-1, count - 1 - YOUNG), -1):  # usually one can, in a tenth of the time
        mine = tpot.item(row), tbt.item(row)
        if _able(deadline.item(row) - start, *mine, min(mine), seconds) and _began_in_time(rows[row]):
            return True
    if count <= YOUNG:
        return False
    deadline, tpot, tbt = deadline[: count - YOUNG], tpot[: count - YOUNG], tbt[: count - YOUNG]
    able = np.flatnonzero(_able(deadline - start, tpot, tbt, np.minimum(tpot, tbt), seconds))
    return any(_began_in_time(rows[row]) for row in able.tolist())


def _able(slack: Any, tpot: Any, tbt: Any, pace: Any, seconds: float) -> Any:
    """Return whether a row is on time in steps of `seconds`, now or after catching up; elementwise.

    `pace` is the lesser of tpot and tbt, inf without an objective.
    """
    ahead = (slack >= seconds) & (seconds <= tbt)
    behind = (slack > -BEHIND * tpot) & (seconds - slack <= CATCH_UP * (pace - seconds)) & (seconds <= pace)
    return (ahead | behind) & (pace < inf)


def _began_in_time(request: RequestView) -> bool:
    first = request.first_token_at
    return first is None or first <= request.arrival + request.slo.ttft


def hopeful(view: View, seconds: float) -> bool:
    """Return whether steps of `seconds` are short enough for a row that decodes here.

    Without running decodes, checks the rows in `prefill`, which will decode later.
    """
    if len(view.decode):
        return keeps_objectives(view.decode, view.start, seconds)
    pace = paces(view.prefill)
    return bool((np.isfinite(pace) & (seconds * (1.0 - ROUNDING) <= pace)).any())


def starved(view: View, left: Order) -> Order:
    """Return the left-out rows that have waited so long that they must join this step, longest wait first.

    Only some join each step, so that it stays short. No row waits longer than PATIENCE + JOINING of
    its tpot, or of steps of all rows.
    """
    if not len(left):
        return left
    rows = view.decode
    tpot = rows.tpot[left]
    waited = view.start - rows.last(left)
    if np.maximum.reduce(waited) < PATIENCE * np.minimum.reduce(tpot) and np.maximum.reduce(tpot) < inf:
        return left[:0]  # the common case
    seconds = view.perf.step_time(decode_load(rows))
    most = PATIENCE * np.maximum(np.where(np.isfinite(tpot), tpot, 0.0), seconds)
    late = np.flatnonzero(~(waited < most))
    late = late[np.argsort(-waited[late], kind="stable")]
    return left[late[: -(-len(left) // JOINING)]]


def spare_time(view: View) -> float:
    """Return how many seconds every row could have waited for a step on arrival, of those that could wait.

    That is their ttft minus the time of their own prompt. Returns inf without rows.
    """
    rows = view.decode
    count = rows.standard
    if not count:
        return inf
    own = view.perf.prefill_times(rows.length[:count], np.zeros(count), view.limits.tokens)
    spare = rows.ttft[:count] - own
    return float(np.minimum.reduce(spare, initial=inf, where=spare > 0.0))


def piggyback_speed(view: View, bound: float) -> float:
    """Return the share of time left for prompts in steps of `bound` seconds that decode every row."""
    if not len(view.decode) or not isfinite(bound):
        return 1.0
    return max(0.0, 1.0 - view.perf.step_time(decode_load(view.decode)) / bound)
