"""What steps leave for prompts beside rows that decode (PB* of SLOs-Serve, arXiv 2504.08784), and how much to draft.

Sections 3.2.2 (dynamic batch size), 3.2.3 and appendix D (speculation lengths), as the digest corrects them. Times in
seconds, lengths in tokens. A tier is a tpot that rows were promised; tiers are in ascending order.
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

NEVER = 1e6  # seconds: the tpot of rows that were promised none
WINDOW = 10  # tokens over which the paper takes a mean (section 6, SLOs)


def accepted(acceptance: float, length: int) -> float:
    """Tokens that a row gains in a step that verifies `length` of them, the target's own one included (1 is plain
    decoding): Acc(sl) = (1 - α^sl) / (1 - α) (appendix D)."""
    if acceptance >= 1.0:
        return float(length)
    return (1.0 - acceptance**length) / (1.0 - acceptance)


def counted_on(acceptance: float, length: int, caution: float) -> float:
    """Tokens a step to count on: the mean less `caution` standard deviations of the mean over as many steps as WINDOW
    tokens take. With 0, the paper's, every second short answer that depends on drafts is late."""
    if length == 1:
        return 1.0
    mean = accepted(acceptance, length)
    squares = sum((2 * token + 1) * acceptance**token for token in range(length))
    return max(1.0, mean - caution * sqrt(max(0.0, squares - mean * mean) * mean / WINDOW))


def prompt_room(perf: PerfModel, load: Load, most: int, bound: float) -> int:
    """How many prompt tokens can join a step of `load` that ends within `bound` seconds (the paper's time2bs), at
    most `most`. Negative where the step is too long without any: so many fewer tokens would do."""
    if most < 1:
        return min(0, most)
    idle = perf.step_time(load)
    if idle > bound:
        slope = (perf.step_time(load.add_chunk(most, 0)) - idle) / most
        return -ceil((idle - bound) / max(slope, 1e-12))
    return largest_chunk(perf.step_time, load, 0, most, bound, grid=1)


class Pace(NamedTuple):
    """How steps are made while it holds."""

    seconds: float  # of one step, at most
    lengths: tuple[int, ...]  # tokens that a row verifies in it, by tier; 1 is plain decoding
    rate: float  # prompt tokens per second that are left


class _Choice(NamedTuple):
    """One way to make steps: the tier `binds` that ends them, at speculation length `lengths[binds]`."""

    binds: int
    seconds: float
    lengths: tuple[int, ...]  # by tier; 0 where no length is enough
    weights: Array  # [tiers] tokens per row and step; less than the length where a row joins only some of the steps


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What steps are made of.

    perf: step times. tokens: most in a step. idle: the most seconds of a step in which no row with a tpot decodes.
    acceptance, draft: chance that a drafted token is right, and most that a row may draft. margin: share of every tpot
    that is kept back. caution: see counted_on. fixed: seconds of a step whatever the rows, instead of the best (the
    paper's ablation of dynamic batch sizes).
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
        """Tokens to count on in a step, by how many are verified: 1, 2 and so on."""
        return [counted_on(self.acceptance, length, self.caution) for length in range(1, self.draft + 2)]


class PrefillSupply:
    """PB*(t, n) / t: prompt tokens per second, for any numbers of rows by tier. A pure function of what it is given.

    tpot: [tiers] ascending. load: the rows that decode now, `rows` of them; each further one adds `each` tokens of
    context.
    """

    def __init__(self, terms: StepCosts, tpot: Sequence[float], load: Load, rows: int, each: float) -> None:
        self._terms = terms
        self._tpot = [min(one, NEVER) for one in tpot]
        self._load = load
        self._rows = rows
        self._each = each
        self._gains = terms.gains()
        self._known: dict[tuple[float, int, float, float], float] = {}  # what `_left` has found

    @cached_property
    def _plain(self) -> _Choice:
        """Steps that the tightest tier ends, without drafts."""
        return self._choice(0, 1)

    @cached_property
    def _choices(self) -> list[_Choice]:
        pairs = product(range(len(self._tpot)), range(1, self._terms.draft + 2))
        return [self._choice(tier, length) for tier, length in pairs]

    @cached_property
    def _empty(self) -> Pace:
        """Steps in which nobody decodes."""
        perf, bound = self._terms.perf, self._idle
        tokens = prompt_room(perf, Load(), self._terms.tokens, bound)
        seconds = perf.step_time(Load().add_chunk(max(1, tokens), 0))
        return Pace(bound, (1,) * len(self._tpot), max(1, tokens) / max(seconds, 1e-9))

    @property
    def _idle(self) -> float:
        return self._terms.idle if self._terms.fixed is None else self._terms.fixed

    def _choice(self, binds: int, length: int) -> _Choice:
        """Tier `binds` verifies `length` tokens and ends the step; the others take the smallest length that lasts as
        long (appendix D)."""
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
        """Whether steps are made in one way beside `counts` rows [tiers] and any more: nobody drafts, and the tightest
        tier ends them from the first on."""
        if self._terms.draft:
            return False
        return counts[0] > 0 or (len(self._tpot) == 1 and self._plain.seconds == self._idle)

    @property
    def weights(self) -> Array:
        """Tokens of a row and step by tier, where steps are made in one way."""
        return self._plain.weights

    def speed(self, tokens: Array, counts: Array, most: tuple[float, float]) -> Array:
        """As `rate`, where steps are made in one way, beside rows that decode so many `tokens` in a step: from those
        of `counts` rows on, up to `most`, which are tokens and rows."""
        count = float(np.add.reduce(counts))
        least = (float(counts @ self.weights), count) if count else (float(self.weights[0]), 1.0)
        first, slope = self._through(self._plain.seconds, 0, least, most)
        speed: Array = first + (tokens - least[0]) * slope
        return speed if count else np.where(tokens > 0, speed, self._empty.rate)

    def most(self, counts: Array) -> float:
        """The most that `speed` is, from those of `counts` rows on."""
        count = float(np.add.reduce(counts))
        plain = self._plain
        return self._left(plain.seconds, 0, float(counts @ plain.weights), count) if count else self._empty.rate

    def lasts(self, tokens: float, rows: float) -> bool:
        """Whether so many rows alone leave any time, where steps are made in one way."""
        load, left = self._rows_of(0, tokens, rows)
        return left >= 0 and (left < 1 or self._terms.perf.step_time(load) <= self._plain.seconds)

    def rate(self, counts: Array) -> Array:
        """Prompt tokens per second beside `counts` [..., tiers] rows, at the best choice; negative where the rows
        alone take longer than they may."""
        flat = counts.reshape(-1, len(self._tpot))  # numpy multiplies it several times as fast
        present, rows = flat > 0, flat @ np.ones(len(self._tpot))
        always: list[bool] = np.all(present, axis=0).tolist()
        best = np.full(len(flat), -np.inf)
        for choice in self._choices:
            if any(here and not length for here, length in zip(always, choice.lengths, strict=True)):
                continue  # too long for a tier that is there in any case
            for here, found in self._rates(choice, flat, present, rows):
                np.maximum(best, found, out=best, where=here)
        result: Array = np.where(rows > 0, best, self._empty.rate).reshape(counts.shape[:-1])
        return result

    def _rates(self, choice: _Choice, counts: Array, present: Mask, rows: Array) -> Iterator[tuple[Mask, Array]]:
        """Where a choice is possible, and the rates, which hold there."""
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
        """As `rate`, for steps of `seconds` that decode `tokens` tokens of `rows` rows: exact at both ends of what
        there is `here`, a line between."""
        low = int(np.where(here, tokens, np.inf).argmin())
        high = int(np.where(here, tokens, -np.inf).argmax())
        least, most = ((float(tokens.flat[end]), float(rows.flat[end])) for end in (low, high))
        first, slope = self._through(seconds, drafts, least, most)
        result: Array = first + (tokens - least[0]) * slope
        return result

    def _through(
        self, seconds: float, drafts: int, least: tuple[float, float], most: tuple[float, float]
    ) -> tuple[float, float]:
        """Prompt tokens per second beside the `least` tokens and rows, and how that grows by token up to the `most`."""
        first = self._left(seconds, drafts, *least)
        if most[0] <= least[0]:
            return first, 0.0
        return first, (self._left(seconds, drafts, *most) - first) / (most[0] - least[0])

    def _left(self, seconds: float, drafts: int, tokens: float, rows: float) -> float:
        """Prompt tokens per second. A step that has all the tokens it may have ends early."""
        asked = seconds, drafts, tokens, rows
        if asked not in self._known:
            load, most = self._rows_of(drafts, tokens, rows)
            room = prompt_room(self._terms.perf, load, most, seconds)
            if 0 < room == most:
                seconds = min(seconds, self._terms.perf.step_time(load.add_chunk(room, 0)))
            self._known[asked] = room / seconds
        return self._known[asked]

    def _rows_of(self, drafts: int, tokens: float, rows: float) -> tuple[Load, int]:
        """The step of so many rows, and how many tokens more it may have."""
        context = self._load.context + self._each * max(0.0, rows - self._rows)
        decode = round(tokens)
        load = Load(0, decode, 0.0, self._load.longest, int(context), 0, drafts)  # _replace takes three times as long
        return load, self._terms.tokens - decode

    def pace(self, counts: Sequence[int]) -> Pace:
        """The best way to make steps for so many rows by tier."""
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
