"""Prompt tokens that steps leave beside decodes (PB* of SLOs-Serve, arXiv 2504.08784), and draft lengths.

Sections 3.2.2 (dynamic batch size), 3.2.3 and appendix D (speculation lengths), with corrections. Times
are in seconds, lengths in tokens. A tier is a TPOT that requests were promised. Tiers are in ascending
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, inf, sqrt
from typing import NamedTuple

import numpy as np

from ...api.perf import Array, Load, PerfModel
from ...feasibility import Mask, largest_chunk

NEVER = 1e6  # seconds: the TPOT of rows without one
WINDOW = 10  # tokens over which the paper averages TPOT (section 6, SLOs)


def accepted(acceptance: float, length: int) -> float:
    """Return the expected tokens of a step that verifies `length` of them: Acc(sl) = (1 - α^sl) / (1 - α).

    The length includes the target's own token, so that 1 is plain decoding (appendix D).
    """
    if acceptance >= 1.0:
        return float(length)
    return (1.0 - acceptance**length) / (1.0 - acceptance)


def counted_on(acceptance: float, length: int, caution: float) -> float:
    """Return the tokens per step to rely on.

    This is the mean, less `caution` standard deviations of the mean over as many steps as WINDOW tokens
    take. With a caution of 0, as in the paper, half of the short answers that rely on drafts are late.
    """
    if length == 1:
        return 1.0
    mean = accepted(acceptance, length)
    squares = sum((2 * token + 1) * acceptance**token for token in range(length))
    return max(1.0, mean - caution * sqrt(max(0.0, squares - mean * mean) * mean / WINDOW))


def prompt_room(perf: PerfModel, load: Load, most: int, bound: float) -> int:
    """Return how many prompt tokens, up to `most`, can join a step of `load` that ends within `bound` seconds.

    This is time2bs of the paper. If the step is too long without any, the result is negative: the number
    of tokens it would have to lose.
    """
    if most < 1:
        return min(0, most)
    idle = perf.step_time(load)
    if idle > bound:
        slope = (perf.step_time(load.add_chunk(most, 0)) - idle) / most
        return -ceil((idle - bound) / max(slope, 1e-12))
    return largest_chunk(perf.step_time, load, 0, most, bound, grid=1)


class Pace(NamedTuple):
    """How steps are made while the pace holds."""

    seconds: float  # longest step
    lengths: tuple[int, ...]  # tokens that a row verifies per step, by tier; 1 is plain decoding
    rate: float  # prompt tokens per second that are left


class _Choice(NamedTuple):
    """One way to make steps: tier `binds` bounds their duration, at speculation length `lengths[binds]`."""

    binds: int
    seconds: float
    lengths: tuple[int, ...]  # by tier; 0 if no length is enough
    weights: Array  # [tiers] tokens per row and step; below the length if a row joins only some of the steps


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the duration and the yield of a step depend on.

    perf: step-time model. tokens: limit of a step. idle: longest step in which no row with a TPOT decodes.
    acceptance: probability that a drafted token is accepted. draft: most tokens that a row may draft.
    margin: share of every TPOT kept in reserve. caution: see `counted_on`.
    fixed: seconds of every step, instead of the best duration (the paper's ablation of dynamic batch
        sizes).
    """

    perf: PerfModel
    tokens: int
    idle: float
    acceptance: float = 0.0
    draft: int = 0
    margin: float = 0.05
    fixed: float | None = None
    caution: float = 1.0

    def gains(self) -> list[float]:
        """Return the tokens to rely on per step that verifies 1, 2, ... tokens."""
        return [counted_on(self.acceptance, length, self.caution) for length in range(1, self.draft + 2)]


class PrefillSupply:
    """PB*(t, n) / t: prompt tokens per second beside any numbers of decodes by tier. A pure function.

    tpot: [tiers] ascending. load: the running decodes, `rows` of them. Each further decode adds `each`
    tokens of context.
    """

    def __init__(self, terms: StepCosts, tpot: Sequence[float], load: Load, rows: int, each: float) -> None:
        self._terms = terms
        self._tpot = [min(pace, NEVER) for pace in tpot]
        self._load = load
        self._rows = rows
        self._each = each
        self._gains = terms.gains()
        self._known: dict[tuple[float, int, float, float], float] = {}  # cache of `_left`

    @cached_property
    def _plain(self) -> _Choice:
        """Steps without drafts, bounded by the tightest tier."""
        return self._choice(0, 1)

    @cached_property
    def _choices(self) -> list[_Choice]:
        pairs = product(range(len(self._tpot)), range(1, self._terms.draft + 2))
        return [self._choice(tier, length) for tier, length in pairs]

    @cached_property
    def _empty(self) -> Pace:
        """Steps without decodes."""
        perf, bound = self._terms.perf, self._idle
        tokens = prompt_room(perf, Load(), self._terms.tokens, bound)
        seconds = perf.step_time(Load().add_chunk(max(1, tokens), 0))
        return Pace(bound, (1,) * len(self._tpot), max(1, tokens) / max(seconds, 1e-9))

    @property
    def _idle(self) -> float:
        return self._terms.idle if self._terms.fixed is None else self._terms.fixed

    def _choice(self, binds: int, length: int) -> _Choice:
        """Make the choice in which tier `binds` verifies `length` tokens and bounds the step.

        The other tiers take the smallest length that lasts as long (appendix D).
        """
        tpot, gains, terms = self._tpot, self._gains, self._terms
        keep = 1.0 - terms.margin
        whole = tpot[binds] * gains[length - 1]
        lengths = []
        for tier, each in enumerate(tpot):
            enough = (sl for sl, gain in enumerate(gains, 1) if each * gain >= whole * (1 - 1e-12))
            lengths.append(length if tier == binds else next(enough, 0))
        longest = terms.idle if tpot[binds] >= NEVER else inf
        seconds = min(keep * whole, longest if terms.fixed is None else terms.fixed)
        weights = [
            sl * min(1.0, seconds / (keep * each * gains[sl - 1])) if sl else 0.0
            for sl, each in zip(lengths, tpot, strict=True)
        ]
        return _Choice(binds, seconds, tuple(lengths), np.array(weights))

    def uniform(self, counts: Array) -> bool:
        """Return whether steps are uniform beside `counts` [tiers] decodes and any more.

        Uniform means that no row drafts, and that the tightest tier bounds every step.
        """
        if self._terms.draft:
            return False
        return counts[0] > 0 or (len(self._tpot) == 1 and self._plain.seconds == self._idle)

    @property
    def weights(self) -> Array:
        """Tokens per row and step by tier, for uniform steps."""
        return self._plain.weights

    def speed(self, tokens: Array, counts: Array, most: tuple[float, float]) -> Array:
        """Return `rate` for uniform steps with `tokens` decoded tokens each.

        The rate is interpolated between `counts` decodes and `most` (tokens, rows).
        """
        count = float(np.add.reduce(counts))
        least = (float(counts @ self.weights), count) if count else (float(self.weights[0]), 1.0)
        first, slope = self._through(self._plain.seconds, 0, least, most)
        speed: Array = first + (tokens - least[0]) * slope
        return speed if count else np.where(tokens > 0, speed, self._empty.rate)

    def most(self, counts: Array) -> float:
        """Return the maximum of `speed`, which is at `counts` decodes."""
        count = float(np.add.reduce(counts))
        plain = self._plain
        return self._left(plain.seconds, 0, float(counts @ plain.weights), count) if count else self._empty.rate

    def lasts(self, tokens: float, rows: float) -> bool:
        """Return whether that many decodes alone leave any time, for uniform steps."""
        load, left = self._rows_of(0, tokens, rows)
        return left >= 0 and (left < 1 or self._terms.perf.step_time(load) <= self._plain.seconds)

    def rate(self, counts: Array) -> Array:
        """Return the prompt tokens per second beside `counts` [..., tiers] decodes, with the best choice.

        Negative if the decodes alone take too long.
        """
        flat = counts.reshape(-1, len(self._tpot))  # numpy multiplies two dimensions several times faster
        present, rows = flat > 0, flat @ np.ones(len(self._tpot))
        always: list[bool] = np.all(present, axis=0).tolist()
        best = np.full(len(flat), -np.inf)
        for choice in self._choices:
            if any(here and not length for here, length in zip(always, choice.lengths, strict=True)):
                continue  # too slow for a tier that is always present
            for here, rates in self._rates(choice, flat, present, rows):
                np.maximum(best, rates, out=best, where=here)
        result: Array = np.where(rows > 0, best, self._empty.rate).reshape(counts.shape[:-1])
        return result

    def _rates(self, choice: _Choice, counts: Array, present: Mask, rows: Array) -> Iterator[tuple[Mask, Array]]:
        """Yield masks of the rows for which a choice is possible, with rates that hold there."""
        possible = present[..., choice.binds]
        for tier, length in enumerate(choice.lengths):
            if not length:
                possible = possible & ~present[..., tier]
        if not possible.any():
            return
        tokens = counts @ choice.weights
        if max(choice.lengths) == 1:
            yield possible, self._line(choice.seconds, 0, tokens, rows, possible)
            return
        drafts = np.where(present, np.array(choice.lengths) - 1, 0).max(axis=-1)
        for draft in np.unique(drafts[possible]).tolist():
            here = possible & (drafts == draft)
            yield here, self._line(choice.seconds, int(draft), tokens, rows, here)

    def _line(self, seconds: float, drafts: int, tokens: Array, rows: Array, here: Mask) -> Array:
        """As `rate`, for steps of `seconds` that decode `tokens` tokens of `rows` rows.

        Exact at the smallest and largest number of tokens that `here` selects, linear between.
        """
        low = int(np.where(here, tokens, np.inf).argmin())
        high = int(np.where(here, tokens, -np.inf).argmax())
        least, most = ((float(tokens.flat[end]), float(rows.flat[end])) for end in (low, high))
        first, slope = self._through(seconds, drafts, least, most)
        result: Array = first + (tokens - least[0]) * slope
        return result

    def _through(
        self, seconds: float, drafts: int, least: tuple[float, float], most: tuple[float, float]
    ) -> tuple[float, float]:
        """Return the prompt tokens per second at the `least` (tokens, rows), and the slope per token to the `most`."""
        first = self._left(seconds, drafts, *least)
        if most[0] <= least[0]:
            return first, 0.0
        return first, (self._left(seconds, drafts, *most) - first) / (most[0] - least[0])

    def _left(self, seconds: float, drafts: int, tokens: float, rows: float) -> float:
        """Return the prompt tokens per second. A step that reaches its token limit ends early."""
        asked = seconds, drafts, tokens, rows
        if asked not in self._known:
            load, most = self._rows_of(drafts, tokens, rows)
            room = prompt_room(self._terms.perf, load, most, seconds)
            if 0 < room == most:
                seconds = min(seconds, self._terms.perf.step_time(load.add_chunk(room, 0)))
            self._known[asked] = room / seconds
        return self._known[asked]

    def _rows_of(self, drafts: int, tokens: float, rows: float) -> tuple[Load, int]:
        """Return the step of that many decodes, and the tokens it has room for."""
        context = self._load.context + self._each * max(0.0, rows - self._rows)
        decode = round(tokens)
        load = Load(0, decode, 0.0, self._load.longest, int(context), 0, drafts)  # _replace takes three times as long
        return load, self._terms.tokens - decode

    def pace(self, counts: Sequence[int]) -> Pace:
        """Choose the best way to make steps for the given number of decodes by tier."""
        array = np.array([counts], dtype=float)
        if not array.any():
            return self._empty
        present, rows = array > 0, array @ np.ones(len(counts))
        rates = [
            max((float(rate[0]) for _, rate in self._rates(choice, array, present, rows)), default=-np.inf)
            for choice in self._choices
        ]
        best = max(range(len(rates)), key=lambda index: (rates[index], -index))
        choice = self._choices[best]
        return Pace(choice.seconds, choice.lengths, rates[best])
