"""Padding: an engine runs a step in the smallest compiled program that holds it, and pays for all of that program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from .model import Coefficients, whole_steps

Order = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True)
class Buckets:
    """Sizes that step programs are compiled for, ascending.

    decode: rows of programs that decode one token a row. mixed: tokens of programs that compute prompt tokens, with or
    without decoding rows. Without sizes nothing is padded. A load above the largest size is taken as it is.

    Each load belongs to one program: the decode sizes, then the mixed sizes for steps of prompt tokens alone, then the
    mixed sizes again for steps with decoding rows beside. Each group ends with a program for larger loads.
    """

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("decode", "mixed"):
            sizes = getattr(self, name)
            if list(sizes) != sorted(set(sizes)) or (sizes and sizes[0] < 1):
                raise InvalidValue(f"buckets {name}={list(sizes)} must be positive sizes in ascending order", name)

    @classmethod
    def of(cls, fields: Mapping[str, Sequence[int]]) -> Buckets:
        """From the dict that `asdict` makes, as a journal holds it."""
        return cls(tuple(fields["decode"]), tuple(fields["mixed"]))

    @property
    def programs(self) -> int:
        return len(self.decode) + 1 + 2 * (len(self.mixed) + 1)

    def placed(self, load: Load) -> tuple[int, Load]:
        """The program of a step, and the load with its padding."""
        prefill, decode, quadratic, longest, context, prefix, drafts = load
        if not prefill:
            at = bisect_left(self.decode, decode)
            if at == len(self.decode) or self.decode[at] == decode:
                return at, load
            decode = self.decode[at]
            return at, tuple.__new__(Load, (prefill, decode, quadratic, longest, context, prefix, drafts))
        at = bisect_left(self.mixed, prefill + decode)
        program = len(self.decode) + 1 + at + (len(self.mixed) + 1 if decode else 0)
        if at == len(self.mixed):
            return program, load
        prefill = self.mixed[at] - decode
        return program, tuple.__new__(Load, (prefill, decode, quadratic, longest, context, prefix, drafts))

    def decoding(self, rows: Array) -> tuple[Order, Array]:
        """Programs and padded rows of steps that decode so many rows, elementwise."""
        axis = self._rows
        at = axis.searchsorted(rows)
        if not len(axis):
            return at, rows
        return at, np.where(at < len(axis), axis[np.minimum(at, len(axis) - 1)], rows)

    @cached_property
    def _rows(self) -> Array:
        return np.array(self.decode, dtype=float)

    @cached_property
    def alone(self) -> Array:
        """0 and the sizes of steps of prompt tokens."""
        return np.array((0.0, *self.mixed))


NONE = Buckets()


@dataclass(frozen=True)
class Padded:
    """The general form of padded loads, times a factor for each program. A Form.

    factors: by program (see Buckets), measured time by that of the coefficients; None: 1 for all.
    """

    coefficients: Coefficients
    buckets: Buckets = NONE
    factors: tuple[float, ...] | None = None

    def step_time(self, load: Load) -> float:
        program, padded = self.buckets.placed(load)
        seconds = self.coefficients.step_time(padded)
        return seconds if self.factors is None else self.factors[program] * seconds

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        programs, padded = self.buckets.decoding(np.asarray(rows, dtype=float))
        times = self.coefficients.decode_times(padded, np.asarray(longest, float), np.asarray(context, float))
        return times if self.factors is None else self._speeds[programs] * times

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        """As Form's: whole chunks run in one program, the shorter last one in another."""
        quadratic = self.coefficients.quadratic
        full, last = whole_steps(np.asarray(tokens, dtype=float), chunk)
        ends, speeds = self._alone(last, chunk)
        if not np.logical_or.reduce(full):  # most prompts are shorter than a chunk
            result: Array = speeds * (ends + quadratic * last * (context + 0.5 * last))
            return result
        whole, one = full * chunk, Load().add_chunk(chunk, 0)
        program, padded = self.buckets.placed(one)
        each = self.coefficients.step_time(padded) - quadratic * padded.quadratic
        speed = 1.0 if self.factors is None else self.factors[program]
        before = quadratic * whole * (context + 0.5 * whole)
        after = quadratic * last * (context + whole + 0.5 * last)
        return speed * (full * each + before) + speeds * (ends + after)

    def _alone(self, tokens: Array, chunk: int) -> tuple[Array, Array]:
        """Seconds by the coefficients, without attention, of steps of so many prompt tokens alone, fewer than `chunk`,
        and their programs' factors; 0 seconds of none."""
        sizes, seconds, factors = self._prices
        at = sizes.searchsorted(tokens)
        if chunk <= sizes[-1]:
            return seconds[at], factors[at]
        inside = np.minimum(at, len(sizes) - 1)
        larger = np.where(at < len(sizes), seconds[inside], self._unpadded(tokens))
        return larger, factors[at]

    @cached_property
    def _prices(self) -> tuple[Array, Array, Array]:
        """0 and the sizes of prompt tokens, what `_alone` says of each, and the factor of each and of larger ones."""
        sizes, first = self.buckets.alone, len(self.buckets.decode)
        seconds = self._unpadded(sizes)
        seconds[0] = 0.0
        return sizes, seconds, self._speeds[first : first + len(sizes) + 1]  # nothing is no program: any factor will do

    def _unpadded(self, tokens: Array) -> Array:
        one = self.coefficients
        result: Array = one.fixed + one.prefill * tokens
        if one.w_moe:
            result = result + one.w_moe * (1.0 - (1.0 - one.p_moe) ** tokens)
        return result

    @cached_property
    def _speeds(self) -> Array:
        return np.ones(self.buckets.programs) if self.factors is None else np.array(self.factors)
