"""What an instance has promised and what has come, as the dynamic program of SLOs-Serve (dp.py) takes it."""

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

STAIR = 0.5  # of the price of a token from the first to the last: what the second half costs at least without stairs
ROUNDING = 1e-9  # seconds: sums of floats may not decide


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
        join = np.concatenate
        return Prompts(
            join((self.deadline, others.deadline)),
            join((self.tokens, others.tokens)),
            join((self.tpot, others.tpot)),
            join((self.pages, others.pages)),
        )

    def at(self, rows: Order | Mask) -> Prompts:
        """Some of them, in that order."""
        return Prompts(self.deadline[rows], self.tokens[rows], self.tpot[rows], self.pages[rows])


@dataclass(frozen=True)
class Commitments:
    """What an instance has promised: rows that decode, and prompts that are not done. start: when it is free."""

    start: float
    tpot: Array  # of each decoding row
    context: Array  # likewise
    prompts: Prompts
    free: float  # pages

    @cached_property
    def load(self) -> Load:
        """The step that decodes one token of every row."""
        return load_of(self.context)

    @cached_property
    def due(self) -> tuple[Array, Array]:
        """Deadlines of the prompts, ascending, and the tokens due by each of them, after 0 for before the first."""
        order = self.prompts.deadline.argsort(kind="stable")
        tokens = np.concatenate(([0.0], self.prompts.tokens[order]))
        return self.prompts.deadline[order], np.add.accumulate(tokens)


def demand(perf: PerfModel, tokens: Array, context: Array, chunk: int) -> Array:
    """Prompt tokens in a step's currency: those to compute, and as many as their attention to what comes before and
    to each other takes in time."""
    size = min(chunk, 2048)
    probes = np.concatenate(([1.0, size / 2, size], tokens)), np.concatenate(([0.0, 0.0, 0.0], context))
    seconds = perf.prefill_times(*probes, chunk)
    one, half, whole = seconds[:3].tolist()
    each, overall = (whole - half) / (size / 2), (whole - one) / size
    if each < STAIR * overall:  # steps are padded, and both sizes to the same: the stairs all in all tell the price
        each = overall
    if not each > 0:
        return tokens
    fixed, seconds = max(0.0, whole - size * each), seconds[3:]
    extra = (seconds - np.ceil(tokens / chunk) * fixed) / each - tokens
    result: Array = tokens + np.maximum(0.0, extra)
    return result


# from a view


def idle_of(view: View, block: float) -> float:
    """The most seconds of a step without running decodes: so long may a new request have to wait.

    block 0: the least `quantum` of what was promised here. Otherwise that share of the median ttft, as given by hand.
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
    """The option `block`, see idle_of. Raises InvalidValue."""
    if not 0 <= block < inf:
        raise InvalidValue(f"{block=} must be 0 or more: a share of the median ttft, 0 for the quantum", "block")
    return block


def quantum(perf: PerfModel, ttft: Array, length: Array, chunk: int) -> float:
    """The longest step that keeps the tightest of some promises: of prompts of `length` tokens in chunks of `chunk`.

    A newcomer can wait for the step under way as long as its ttft exceeds the time of its prompt alone. A step is
    never shorter than that time: cut in pieces the prompt itself would be late, each of which takes the fixed time
    of a step. A promise that cannot be kept alone does not count.
    """
    own = perf.prefill_times(length, np.zeros(len(length)), chunk)
    longest = np.maximum(ttft - own, own + ROUNDING)[own <= ttft + ROUNDING]
    return min(float(np.minimum.reduce(longest)), NEVER) if len(longest) else NEVER


def terms_of(
    view: View, idle: float, *, draft: int, margin: float, fixed: float | None = None, caution: float = 1.0
) -> StepCosts:
    return StepCosts(view.perf, view.limits.tokens, idle, view.acceptance, draft, margin, fixed, caution)


def _median(values: Array) -> float:
    """np.median at a third of its time."""
    middle = len(values) // 2
    if len(values) % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1].tolist()
    return 0.5 * float(low + high)


def prompts_of(view: View, count: int, output: int) -> Prompts:
    """The first `count` rows of view.prefill. Each is taken to hold `output` tokens beyond its prompt. On a prefill
    instance nobody decodes here."""
    rows = view.prefill
    remaining = rows.remaining[:count]
    tokens = demand(view.perf, *_to_compute(rows, slice(count)), view.limits.tokens)
    tpot: Array = np.full(count, NEVER) if view.role is Role.PREFILL else rows.tightest[:count]
    more = remaining * (1.0 - rows.running[:count]) + output  # a running one holds the pages of its prompt
    return Prompts(rows.deadline[:count], tokens, tpot, blocks(more, view))


def _to_compute(rows: QueueView, some: slice | Order) -> tuple[Array, Array]:
    """Tokens that each of some rows has to compute, and those before them: what a waiting one is expected to find in
    the prefix cache is there."""
    remaining = rows.remaining[some]
    hit = np.minimum(rows.hit[some], remaining - 1)  # the last known token is always computed
    return remaining - hit, rows.context[some] + hit


def alone(view: View, new: Order) -> Mask:
    """Which rows of view.prefill are in time on this server if it serves nothing else: the prompt by its deadline, and
    decode steps of that row alone within the tightest tpot of its stages. The pool must hold the prompt and a token. No
    margin is kept."""
    rows = view.prefill
    tpot = np.full(len(new), NEVER) if view.role is Role.PREFILL else rows.tightest[new]
    return in_time(view, rows.deadline[new], *_to_compute(rows, new), rows.length[new], tpot)


def in_time(view: View, deadline: Array, tokens: Array, context: Array, length: Array, tpot: Array) -> Mask:
    """As `alone`, of prompts with so many tokens to compute after `context`, of `length` in all."""
    ends = view.start + view.perf.prefill_times(tokens, context, view.limits.tokens)
    each = view.perf.decode_times(np.ones(len(length)), length, length)
    fits = blocks(length + 1, view) <= view.limits.pages
    result: Mask = fits & (ends <= deadline + ROUNDING) & (each <= tpot)
    return result


def blocks(tokens: Array, view: View) -> Array:
    """Pages that so many tokens fill or begin."""
    result: Array = np.ceil(tokens / view.limits.page_size)
    return result


def standing_of(view: View, prompts: Prompts, output: int) -> Commitments:
    """What an instance has promised: every row of view.decode that is not best effort, and these prompts.

    Pages that best effort holds count as free. Each row is taken to generate `output` tokens in all.
    """
    rows = view.decode
    count = rows.standard
    grow = np.maximum(0.0, output - (rows.context[:count] - rows.length[:count])).sum() / view.limits.page_size
    free = view.free_pages + held_by_best_effort(view, np.ceil)[0] - float(grow) - float(prompts.pages.sum())
    if view.role is Role.PREFILL:
        return Commitments(view.start, np.zeros(0), np.zeros(0), prompts, free)
    return Commitments(view.start, rows.tightest[:count], rows.context[:count], prompts, free)
