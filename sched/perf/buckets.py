"""Padding: an engine runs a step in the smallest compiled program that holds it, and pays for all of that program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from ..errors import InvalidValue
from .model import Array, Coefficients, Load, whole_steps

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
        prefill, decode, *rest = load
        if not prefill:
            at = bisect_left(self.decode, decode)
            if at == len(self.decode) or self.decode[at] == decode:
                return at, load
            return at, tuple.__new__(Load, (prefill, self.decode[at], *rest))
        at = bisect_left(self.mixed, prefill + decode)
        program = len(self.decode) + 1 + at + (len(self.mixed) + 1 if decode else 0)
        if at == len(self.mixed):
            return program, load
        return program, tuple.__new__(Load, (self.mixed[at] - decode, decode, *rest))

    def decoding(self, rows: Array) -> tuple[Order, Array]:
        """Programs and padded rows of steps that decode so many rows, elementwise."""
        return _padded(self._axes[0], rows)

    def prefilling(self, tokens: Array) -> tuple[Order, Array]:
        """Programs and padded tokens of steps of so many prompt tokens alone, elementwise."""
        programs, padded = _padded(self._axes[1], tokens)
        return programs + len(self.decode) + 1, padded

    @cached_property
    def _axes(self) -> tuple[Array, Array]:
        return np.array(self.decode, dtype=float), np.array(self.mixed, dtype=float)


def _padded(axis: Array, sizes: Array) -> tuple[Order, Array]:
    at = np.searchsorted(axis, sizes)
    if not len(axis):
        return at, sizes
    return at, np.where(at < len(axis), axis[np.minimum(at, len(axis) - 1)], sizes)


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
        return self._factors(programs) * times

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        """As Form's: whole chunks run in one program, the shorter last one in another."""
        one = self.coefficients
        full, last = whole_steps(np.asarray(tokens, dtype=float), chunk)
        whole = full * chunk
        before = one.quadratic * whole * (context + 0.5 * whole)
        after = one.quadratic * last * (context + whole + 0.5 * last)
        program, padded = self.buckets.prefilling(np.array([float(chunk)]))
        programs, ends = self.buckets.prefilling(last)
        times = self._factors(program)[0] * (full * self._alone(padded)[0] + before)
        result: Array = times + np.where(last > 0, self._factors(programs) * (self._alone(ends) + after), 0.0)
        return result

    def _alone(self, tokens: Array) -> Array:
        """Seconds of steps of so many padded prompt tokens, attention left out."""
        one = self.coefficients
        result: Array = one.fixed + one.prefill * tokens
        if one.w_moe:
            result = result + one.w_moe * (1.0 - (1.0 - one.p_moe) ** tokens)
        return result

    def _factors(self, programs: Order) -> Array:
        if self.factors is None:
            return np.ones(len(programs))
        return cast(Array, np.array(self.factors)[programs])
