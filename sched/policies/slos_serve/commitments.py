"""What an instance has promised and what new prompts demand: the inputs of the SLOs-Serve dynamic program (dp.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from ...api.errors import InvalidValue
from ...api.perf import Array, Load, PerfModel
from ...api.policy import Order, QueueView, Role, View
from ...feasibility import Mask, held_by_best_effort, load_of
from .speculation import NEVER, StepCosts

STAIR = 0.5  # of the mean price of a token: if the second half costs less, steps are padded to buckets
ROUNDING = 1e-9  # seconds: rounding of sums must not decide


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts to be computed, as columns.

    tokens: demand on a step's budget (see `demand`). pages: pages they will take.
    """

    deadline: Array
    tokens: Array
    tpot: Array
    pages: Array

    def __len__(self) -> int:
        return len(self.deadline)

    def and_(self, others: Prompts) -> Prompts:
        """Append `others`."""
        join = np.concatenate
        return Prompts(
            join((self.deadline, others.deadline)),
            join((self.tokens, others.tokens)),
            join((self.tpot, others.tpot)),
            join((self.pages, others.pages)),
        )

    def at(self, rows: Order | Mask) -> Prompts:
        """Select rows, in that order."""
        return Prompts(self.deadline[rows], self.tokens[rows], self.tpot[rows], self.pages[rows])


@dataclass(frozen=True)
class Commitments:
    """What an instance has promised: running decodes and unfinished prompts."""

    start: float  # when the instance is free
    tpot: Array  # [decodes]
    context: Array  # [decodes]
    prompts: Prompts
    free: float  # pages that remain

    @cached_property
    def load(self) -> Load:
        """The step that decodes one token of every row."""
        return load_of(self.context)

    @cached_property
    def due(self) -> tuple[Array, Array]:
        """Prompt deadlines, ascending, and the cumulative tokens due by each of them, with a leading 0."""
        order = self.prompts.deadline.argsort(kind="stable")
        tokens = np.concatenate(([0.0], self.prompts.tokens[order]))
        return self.prompts.deadline[order], np.add.accumulate(tokens)


def demand(perf: PerfModel, tokens: Array, context: Array, chunk: int) -> Array:
    """Convert prompt tokens to units of a step's token budget.

    The result is the tokens to compute, plus the tokens that take as long as the attention to the
    context and among the new tokens.
    """
    size = min(chunk, 2048)
    probes = np.concatenate(([1.0, size / 2, size], tokens)), np.concatenate(([0.0, 0.0, 0.0], context))
    seconds = perf.prefill_times(*probes, chunk)
    single, half, whole = seconds[:3].tolist()
    each, overall = (whole - half) / (size / 2), (whole - single) / size
    if each < STAIR * overall:  # both sizes are padded to the same bucket: only the overall price is meaningful
        each = overall
    if not each > 0:
        return tokens
    fixed, seconds = max(0.0, whole - size * each), seconds[3:]
    extra = (seconds - np.ceil(tokens / chunk) * fixed) / each - tokens
    result: Array = tokens + np.maximum(0.0, extra)
    return result


# from a view


def idle_of(view: View, block: float) -> float:
    """Return the longest duration, in seconds, of a step without decodes, since a new request may wait for it.

    block: 0 takes the `quantum` of all promises on this instance. Otherwise the duration is this share
        of the median TTFT.
    """
    both = view.prefill, view.decode
    if block:
        ttft = np.concatenate([rows.ttft for rows in both])
        return block * min(_median(ttft), NEVER) if len(ttft) else NEVER
    ttft, length = (
        np.concatenate([column[: rows.standard] for rows, column in zip(both, columns, strict=True)])
        for columns in ([rows.ttft for rows in both], [rows.length for rows in both])
    )
    return quantum(view.perf, ttft, length, view.limits.tokens)


def check_block(block: float) -> float:
    """Check the option `block` (see `idle_of`). Raises InvalidValue if it is negative or infinite."""
    if not 0 <= block < inf:
        raise InvalidValue(f"{block=} must be 0 (follow the tightest promise) or a share of the median ttft", "block")
    return block


def quantum(perf: PerfModel, ttft: Array, length: Array, chunk: int) -> float:
    """Return the longest step, in seconds, that keeps the tightest of some promises.

    A new request can wait for the running step as long as its TTFT exceeds the time of its prompt alone.
    A step is never shorter than the time of that prompt: each step has a fixed time, so the prompt would
    be late if it were cut into several. Promises that cannot be kept even alone do not count.

    ttft, length: [prompts], computed in chunks of `chunk` tokens.
    """
    own = perf.prefill_times(length, np.zeros(len(length)), chunk)
    longest = np.maximum(ttft - own, own + ROUNDING)[own <= ttft + ROUNDING]
    return min(float(np.minimum.reduce(longest)), NEVER) if len(longest) else NEVER


def terms_of(
    view: View, idle: float, *, draft: int, margin: float, fixed: float | None = None, caution: float = 1.0
) -> StepCosts:
    return StepCosts(view.perf, view.limits.tokens, idle, view.acceptance, draft, margin, fixed, caution)


def _median(values: Array) -> float:
    """Compute np.median in a third of its time."""
    middle = len(values) // 2
    if len(values) % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1].tolist()
    return 0.5 * float(low + high)


def prompts_of(view: View, count: int, output: int) -> Prompts:
    """Describe the first `count` rows of `view.prefill`, each with `output` tokens beyond its prompt.

    On a prefill instance nothing decodes, so there the prompts have no TPOT.
    """
    rows = view.prefill
    remaining = rows.remaining[:count]
    tokens = demand(view.perf, *_to_compute(rows, slice(count)), view.limits.tokens)
    tpot: Array = np.full(count, NEVER) if view.role is Role.PREFILL else rows.tightest[:count]
    more = remaining * (1.0 - rows.running[:count]) + output  # a running prompt already holds its pages
    return Prompts(rows.deadline[:count], tokens, tpot, blocks(more, view))


def _to_compute(rows: QueueView, some: slice | Order) -> tuple[Array, Array]:
    """Return the tokens to compute and the tokens before them, with expected prefix hits counted as computed."""
    remaining = rows.remaining[some]
    hit = np.minimum(rows.hit[some], remaining - 1)  # the last known token is always computed
    return remaining - hit, rows.context[some] + hit


def alone(view: View, new: Order) -> Mask:
    """Return which rows of `view.prefill` this instance serves in time if it serves nothing else.

    The prompt must meet its deadline, and decode steps of that row alone must keep the tightest TPOT of
    its stages. The pool must hold the prompt and one token. There is no margin.
    """
    rows = view.prefill
    tpot = np.full(len(new), NEVER) if view.role is Role.PREFILL else rows.tightest[new]
    return in_time(view, rows.deadline[new], *_to_compute(rows, new), rows.length[new], tpot)


def in_time(view: View, deadline: Array, tokens: Array, context: Array, length: Array, tpot: Array) -> Mask:
    """As `alone`, for prompts of `length` tokens with `tokens` to compute after `context`."""
    ends = view.start + view.perf.prefill_times(tokens, context, view.limits.tokens)
    each = view.perf.decode_times(np.ones(len(length)), length, length)
    fits = blocks(length + 1, view) <= view.limits.pages
    result: Mask = fits & (ends <= deadline + ROUNDING) & (each <= tpot)
    return result


def blocks(tokens: Array, view: View) -> Array:
    """Return the pages that hold `tokens` tokens, the last one partly filled."""
    result: Array = np.ceil(tokens / view.limits.page_size)
    return result


def standing_of(view: View, prompts: Prompts, output: int) -> Commitments:
    """Collect what an instance has promised: all decodes that are not best effort, and these prompts.

    Pages held by best effort count as free. Each decode is assumed to generate `output` tokens in total.
    """
    rows = view.decode
    count = rows.standard
    grow = np.maximum(0.0, output - (rows.context[:count] - rows.length[:count])).sum() / view.limits.page_size
    free = view.free_pages + held_by_best_effort(view, np.ceil)[0] - float(grow) - float(prompts.pages.sum())
    if view.role is Role.PREFILL:
        return Commitments(view.start, np.zeros(0), np.zeros(0), prompts, free)
    return Commitments(view.start, rows.tightest[:count], rows.context[:count], prompts, free)
