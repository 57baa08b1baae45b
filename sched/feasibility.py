"""What can still be on time: own remaining work, the on-time set, and what decoding leaves of a step.

One service for every policy, routing and admission. Pure functions of a View and its numpy columns; seconds and
tokens. What takes longer than linear time looks only at requests that could be on time alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heappushpop
from itertools import count, repeat
from math import inf, isfinite
from typing import Any, cast

import numpy as np

from .api.perf import Array, Load, PerfModel
from .api.policy import Order, QueueView, View
from .api.request import RequestView

GRID = 64  # tokens: chunks that share a step with decoding rows are multiples of it
STAIR = 4  # times that a token costs more on average than the next one does, where a step is padded
JOIN = 0.97  # of the time until a token is due, for steps that a row which joined late can make up in
BEHIND = 8.0  # tpot: a row later than that does not hurry the others any more
NOBODY: Order = np.arange(0)
CATCH_UP = 100.0  # tokens: a row that needs more to be on time again is taken to end before
ROUNDING = 1e-9  # share of a step: sums of floats may not decide
PATIENCE = 4.0  # tpot or steps, whichever is longer: after that a row that was left out joins a step
YOUNG = 4  # rows that are asked one by one whether they can keep their objectives, before all are
JOINING = 4  # one in so many of the rows that waited that long joins each step
MANY = 512  # jobs
BINS = 64  # of jobs by their seconds
GUESSES = 4  # of how many bins fit, before their number is halved
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Cost = Callable[[Load], float]  # of a step: predicted seconds, or tokens


def remaining_work(view: View, rows: QueueView, count: int | None = None) -> Array:
    """Seconds that each request's own remaining prompt tokens take, computed alone in chunks of `limits.tokens`; what
    a waiting one is expected to find in the prefix cache need not be computed. Of the first `count` rows, or all."""
    remaining = rows.remaining[:count]
    hit = np.minimum(rows.hit[:count], remaining - 1)  # the last known token is always computed
    return view.perf.prefill_times(remaining - hit, rows.context[:count] + hit, view.limits.tokens)


def left_behind(request: RequestView) -> int:
    """Prompt tokens of a request in a started step that this step does not compute."""
    return 0 if request.generated and request.remaining == 1 else request.remaining


def on_time_set(start: float, deadline: Array, work: Array, kept: Mask | None = None) -> Mask:
    """The largest set of jobs that one server, free at `start`, can finish by their deadlines (Moore and Hodgson).

    Jobs are taken by deadline; when one makes the set late, the job with the most work leaves. Jobs in `kept` leave
    only where the set would be late without anybody else. Ties by row, so that equal inputs give equal sets.
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
    if kept is None and len(order) >= MANY:
        chosen[order] = _largest_of_many(start, due, seconds, order)
        return chosen
    latest = alone[::-1]
    most = latest[np.argsort(-work[latest], kind="stable")]  # the most work first, of equals the later row
    rank = np.empty(len(deadline), dtype=np.intp)
    rank[most] = np.arange(len(most))
    ranks, weights, stays = rank[order].tolist(), work[most].tolist(), [] if kept is None else kept[order].tolist()
    heap = [one for one, stay in zip(ranks[:first], stays, strict=False) if not stay] if stays else ranks[:first]
    heapify(heap)
    at, dropped = float(ends[first]), []
    limits = due[first:].tolist()
    for one, limit, stay in zip(ranks[first:], limits, stays[first:] or repeat(False), strict=False):
        at += weights[one]
        if at <= limit:
            if not stay:
                heappush(heap, one)
            continue
        leaves = heappop(heap) if stay and heap else heappushpop(heap, one)
        at -= weights[leaves]
        dropped.append(leaves)
        while at > limit:
            leaves = heappop(heap) if heap else one
            at -= weights[leaves]
            dropped.append(leaves)
    chosen[most[dropped]] = False
    return chosen


def _largest_of_many(start: float, due: Array, seconds: Array, rows: Order) -> Mask:
    """`on_time_set` of jobs in the order of their deadlines, of which only few are looked at one by one.

    Whenever a set is late the longest job in it leaves, so what becomes of a job does not depend on longer ones. Jobs
    are sorted into bins by their seconds. Those of the first bins, as many as are on time with one another, all stay;
    jobs of the next bin, and then of the others, join where they fit.
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
    """Which of the jobs that are `able` are on time together beside others that leave so much `slack` at the end of
    each job, as `on_time_set` picks them. Jobs that do not fit by themselves are left out first: they are in no set
    that is on time, and of the largest sets that with the least work is the same without them."""
    joins: Mask = np.zeros(len(slack), dtype=bool)
    left = np.flatnonzero(able)
    if not len(left):
        return joins
    limits = np.minimum.reduceat(slack, left)  # of what joins, up to the next of these jobs
    fits = np.flatnonzero(seconds[left] <= np.minimum.accumulate(limits[::-1])[::-1])
    if not len(fits):
        return joins
    left, limits = left[fits], np.minimum.reduceat(limits, fits)
    most = np.lexsort((-rows[left], -seconds[left]))  # the most work first, of equals the later row
    rank = np.empty(len(left), dtype=np.intp)
    rank[most] = np.arange(len(left))
    weights, heap, dropped, extra = seconds[left[most]].tolist(), list[int](), [], 0.0
    for one, limit in zip(rank.tolist(), limits.tolist(), strict=True):
        heappush(heap, one)
        extra += weights[one]
        while heap and extra > limit:
            dropped.append(heappop(heap))
            extra -= weights[dropped[-1]]
    joins[left] = True
    joins[left[most[dropped]]] = False
    return joins


def decode_load(rows: QueueView) -> Load:
    """The step that decodes one token of every row."""
    return load_of(rows.context)


def load_of(context: Array) -> Load:
    """The step that decodes one token of a row for each of these contexts."""
    return joined(Load(), context)


def joined(load: Load, context: Array, tokens: int | None = None) -> Load:
    """A step with a row more for each of these contexts, which decode one token each, or so many in all."""
    if not len(context):
        return load
    return load.add_rows(tokens or len(context), int(np.maximum.reduce(context)), int(np.add.reduce(context)))


def with_prompt(load: Load, request: RequestView, hit: int) -> Load:
    """A step that also computes all that is left of a prompt, of which so many tokens are in the prefix cache."""
    hit = min(hit, request.remaining - 1)
    return load.add_chunk(request.remaining - hit, request.context + hit)


def fitting(cost: Cost, load: Load, context: Array, bound: float, tokens: Sequence[int] | None = None) -> int:
    """How many rows, in their order, can join a step of `load` without its cost exceeding `bound`. More rows never
    cost less. tokens: that they decode up to each; one by each where none are given."""
    count = len(context)
    verified = range(1, count + 1) if tokens is None else tokens
    if not count or cost(joined(load, context, verified[-1])) <= bound:
        return count
    longest, total = np.maximum.accumulate(context).tolist(), np.add.accumulate(context).tolist()

    def seconds(row: int) -> float:
        return cost(load.add_rows(verified[row], int(longest[row]), int(total[row])))

    return bisect_right(range(count - 1), bound, key=seconds)


def largest_chunk(cost: Cost, load: Load, done: int, left: int, bound: float, grid: int = GRID) -> int:
    """The most tokens of a prompt with `done` tokens computed that can join a step of `load` without its cost exceeding
    `bound`: a multiple of `grid`, all that is left, or as many as fill up a padded step; 0 where none can. More tokens
    never cost less."""
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
    low, high = 1, -(-left // grid)  # in grid steps: low fits, high does not
    for turn in count():
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if turn % 4 < 3:  # where the line between them is: next to it, as costs are nearly linear in the tokens
            share = (bound - short) / (long - short)
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        between = cost(load.add_chunk(middle * grid, done))
        if between <= bound:
            low, short = middle, between
        else:
            high, long = middle, between
    return _filled(cost, load, done, low * grid, min(high * grid, left), short, long, bound)


def _filled(cost: Cost, load: Load, done: int, low: int, high: int, least: float, long: float, bound: float) -> int:
    """The most tokens from `low` on that cost at most `bound`, where `low` cost `least`, which is not more, `high` cost
    `long`, which is, and a stair lies in between: the next token costs far less than its share. `low` without one."""
    if high - low > 1 and STAIR * (high - low) * (cost(load.add_chunk(low + 1, done)) - least) < long - least:
        tokens = range(low, high)
        return low - 1 + bisect_right(tokens, bound, key=lambda size: cost(load.add_chunk(size, done)))
    return low


def chunk_times(perf: PerfModel, load: Load, tokens: int, context: Array) -> Array:
    """Predicted seconds of a step of `load` with `tokens` new tokens of a prompt after `context` computed ones,
    elementwise."""
    seconds: Any = perf.step_time(load.add_chunk(tokens, cast(Any, context)))
    result: Array = np.broadcast_to(seconds, context.shape)
    return result


def tightest_tpot(rows: QueueView) -> float:
    """Seconds: the least tpot of the rows that are not best effort; inf without one."""
    tpot = promised(rows, rows.tpot)
    return float(np.minimum.reduce(tpot)) if len(tpot) else inf


def promised(rows: QueueView, column: Array) -> Array:
    """A column without the rows of best effort."""
    return column[: rows.standard]


def held_by_best_effort(view: View, whole: Callable[[Array], Array]) -> tuple[float, int]:
    """Pages and slots that best effort holds: others may take them. `whole` makes whole pages of tokens."""
    pages, slots = 0.0, 0
    for rows in (view.prefill, view.decode):
        count = rows.standard
        if count < len(rows):
            running = rows.running[count:] > 0
            pages += float(whole(rows.context[count:][running] / view.limits.page_size).sum())
            slots += int(np.count_nonzero(running))
    return pages, slots


def deadlines(rows: QueueView) -> Array:
    """When the next token of each row is due; -inf for best effort, which never has a deadline to keep."""
    return rows.deadline if rows.standard == len(rows) else np.where(rows.best_effort > 0, -inf, rows.deadline)


def tightest_tbt(rows: QueueView) -> float:
    """Seconds: the least tbt that a row was promised; inf without one."""
    tbt = promised(rows, rows.tbt)
    return float(np.minimum.reduce(tbt)) if len(tbt) else inf


def mixed_bound(view: View, share: float = 0.75, stretch: float = 1.0, cushion: float = 0.0, gap: float = inf) -> float:
    """Seconds that a step may take which decodes the rows here and computes prompts beside: `share` of the tightest
    tpot, since a request that joins waits for the running step; up to `stretch` of it while every row is ahead of its
    deadline by more than that and `cushion` tpot; at most `gap` of the tightest tbt."""
    rows = view.decode
    tpot = tightest_tpot(rows)
    if not isfinite(tpot):
        return inf
    slack = float(np.minimum.reduce(promised(rows, rows.deadline))) - view.start
    bound = max(share * tpot, min(slack - cushion * tpot, stretch * tpot))
    return min(bound, gap * tightest_tbt(rows)) if isfinite(gap) else bound


def joiners_bound(view: View, alone: float, young: int = 3, ahead: int = 3) -> float:
    """Seconds that a step may take so that each row which decoded at most `young` tokens is on time again with the
    first of its next `ahead` tokens that allows a step of all rows, which takes `alone` seconds, all steps until then
    being as long. A row that waited for a long step when it joined has nothing in hand to make up for it, and may have
    few tokens to come. inf where no row needs it, or none can be helped."""
    rows = view.decode
    joined_lately = promised(rows, rows.context - rows.length) <= young
    fresh = np.flatnonzero(joined_lately & np.isfinite(promised(rows, rows.tpot)))
    if not len(fresh):
        return inf
    slack, tpot, more = rows.deadline[fresh] - view.start, rows.tpot[fresh], np.arange(ahead)[:, None]
    each = JOIN * (slack + more * tpot) / (more + 1)  # [ahead, fresh]: the token after `more` others is that much later
    able = each >= alone
    first = each[able.argmax(axis=0), np.arange(len(fresh))]
    return float(np.minimum.reduce(first, initial=inf, where=np.logical_or.reduce(able, axis=0)))


def late_joiners(view: View, share: float = 0.1, lately: int = 20) -> Order:
    """Rows with one token, whose next would be late in a step of all rows but not in one of theirs, where nobody else
    is late for it. Most came while a long step ran; of an answer of three tokens nothing can be made up for later.
    Nobody where such steps would take more than a `share` of the time, by how many came in the last `lately` tokens."""
    rows = view.decode
    decoded = promised(rows, rows.context - rows.length)
    fresh = np.flatnonzero(decoded <= 1)
    if not len(fresh) or len(fresh) == len(rows):
        return NOBODY
    slack = promised(rows, rows.deadline) - view.start
    every = view.perf.step_time(decode_load(rows))
    late = fresh[JOIN * slack[fresh] < every]
    if not len(late):
        return NOBODY
    alone = view.perf.step_time(load_of(rows.context[late]))
    if np.count_nonzero(decoded <= lately) * alone > share * lately * tightest_tpot(rows) * len(late):
        return NOBODY
    late = late[slack[late] + rows.tpot[late] >= alone + every]  # with this token, or the one after it
    on_time = (slack >= every) & (slack < alone + every)
    on_time[late] = False
    return NOBODY if on_time.any() else late


def keeps_objectives(rows: QueueView, start: float, seconds: float) -> bool:
    """Whether some row here can keep its objectives in steps of `seconds`: its first token was in time, and it is on
    time with such a step, or is back on time after some. Where none can, leaving rows out of a step, or cutting its
    prompts short, gains nothing: a policy does neither. Best effort and rows without objectives have none to keep."""
    count = rows.standard
    if not count:
        return False
    seconds *= 1.0 - ROUNDING
    deadline, tpot, tbt = rows.deadline, rows.tpot, rows.tbt
    for row in range(count - 1, max(-1, count - 1 - YOUNG), -1):  # one of them mostly can: a tenth of the time
        mine = tpot.item(row), tbt.item(row)
        if _able(deadline.item(row) - start, *mine, min(mine), seconds) and _began_in_time(rows[row]):
            return True
    if count <= YOUNG:
        return False
    deadline, tpot, tbt = deadline[: count - YOUNG], tpot[: count - YOUNG], tbt[: count - YOUNG]
    able = np.flatnonzero(_able(deadline - start, tpot, tbt, np.minimum(tpot, tbt), seconds))
    return any(_began_in_time(rows[row]) for row in able.tolist())


def _able(slack: Any, tpot: Any, tbt: Any, pace: Any, seconds: float) -> Any:
    """Whether a row is on time in steps of `seconds`, now or after some; elementwise. pace: the lesser of tpot and tbt,
    inf where nothing was promised."""
    ahead = (slack >= seconds) & (seconds <= tbt)
    behind = (slack > -BEHIND * tpot) & (seconds - slack <= CATCH_UP * (pace - seconds)) & (seconds <= pace)
    return (ahead | behind) & (pace < inf)


def _began_in_time(request: RequestView) -> bool:
    first = request.first_token_at
    return first is None or first <= request.arrival + request.slo.ttft


def hopeful(view: View, seconds: float) -> bool:
    """Whether steps of `seconds` are short enough for a row that decodes here, or, where none does, for one to come."""
    if len(view.decode):
        return keeps_objectives(view.decode, view.start, seconds)
    tpot = promised(view.prefill, view.prefill.tpot)
    return bool((np.isfinite(tpot) & (seconds * (1.0 - ROUNDING) <= tpot)).any())


def starved(view: View, left: Order) -> Order:
    """Of the rows left out of a step, those that have waited for so long that they join it, the longest wait first.
    Only some join each step, so that it stays short: no row waits for more than PATIENCE + JOINING of its tpot, or of
    steps of all rows."""
    if not len(left):
        return left
    rows = view.decode
    tpot = rows.tpot[left]
    waited = view.start - rows.last(left)
    if np.maximum.reduce(waited) < PATIENCE * np.minimum.reduce(tpot) and np.maximum.reduce(tpot) < inf:
        return left[:0]  # what nearly every step finds
    seconds = view.perf.step_time(decode_load(rows))
    most = PATIENCE * np.maximum(np.where(np.isfinite(tpot), tpot, 0.0), seconds)
    late = np.flatnonzero(~(waited < most))
    late = late[np.argsort(-waited[late], kind="stable")]
    return left[late[: -(-len(left) // JOINING)]]


def spare_time(view: View) -> float:
    """Seconds that nine in ten of the rows here could have waited for a step when they came: their ttft less their own
    prompts' time. inf without a row."""
    rows = view.decode
    count = rows.standard
    if not count:
        return inf
    own = view.perf.prefill_times(rows.length[:count], np.zeros(count), view.limits.tokens)
    return float(np.partition(rows.ttft[:count] - own, count // 10)[count // 10])


def piggyback_speed(view: View, bound: float) -> float:
    """Share of a decode instance's time that prompts can have, in steps of `bound` seconds with every row decoding."""
    if not len(view.decode) or not isfinite(bound):
        return 1.0
    return max(0.0, 1.0 - view.perf.step_time(decode_load(view.decode)) / bound)
