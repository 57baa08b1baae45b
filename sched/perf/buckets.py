"""Padding: an engine runs a step in the smallest compiled program that holds it, at the cost of the whole program."""

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
    """Sizes of compiled step programs, ascending.

    decode: rows of the programs that decode one token per row. mixed: tokens of the programs that compute
    prompt tokens, with or without decodes. Without sizes nothing is padded. A load above the largest size
    is not padded either.

    Each load belongs to one program, numbered in this order: decode sizes, mixed sizes for steps of prompt
    tokens alone, mixed sizes for steps with decodes. Each group ends with a program for larger loads.
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
        """Create buckets from the dict that `asdict` makes, as found in a journal."""
        return cls(tuple(fields["decode"]), tuple(fields["mixed"]))

    @property
    def programs(self) -> int:
        return len(self.decode) + 1 + 2 * (len(self.mixed) + 1)

    def placed(self, load: Load) -> tuple[int, Load]:
        """Return the program of a step, and its load with padding."""
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
        """Return the programs and padded rows of pure decode steps, elementwise."""
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
        """0 and the sizes of steps of prompt tokens alone."""
        return np.array((0.0, *self.mixed))


NONE = Buckets()


@dataclass(frozen=True)
class Padded:
    """The general form on padded loads, times a factor per program. A `Form`.

    factors: by program (see `Buckets`), measured time over predicted time. None: 1 for all.
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
        """As `Form.prefill_times`: whole chunks run in one program, the shorter last one in another."""
        quadratic = self.coefficients.quadratic
        full, last = whole_steps(np.asarray(tokens, dtype=float), chunk)
        ends, speeds = self._alone(last, chunk)
        if not np.logical_or.reduce(full):  # most prompts are shorter than a chunk
            result: Array = speeds * (ends + quadratic * last * (context + 0.5 * last))
            return result
        whole, load = full * chunk, Load().add_chunk(chunk, 0)
        program, padded = self.buckets.placed(load)
        each = self.coefficients.step_time(padded) - quadratic * padded.quadratic
        speed = 1.0 if self.factors is None else self.factors[program]
        before = quadratic * whole * (context + 0.5 * whole)
        after = quadratic * last * (context + whole + 0.5 * last)
        return speed * (full * each + before) + speeds * (ends + after)

    def _alone(self, tokens: Array, chunk: int) -> tuple[Array, Array]:
        """Price steps of prompt tokens alone, fewer than `chunk`: seconds without attention, and program factors.

        No tokens take 0 seconds.
        """
        sizes, seconds, factors = self._prices
        at = sizes.searchsorted(tokens)
        if chunk <= sizes[-1]:
            return seconds[at], factors[at]
        inside = np.minimum(at, len(sizes) - 1)
        larger = np.where(at < len(sizes), seconds[inside], self._unpadded(tokens))
        return larger, factors[at]

    @cached_property
    def _prices(self) -> tuple[Array, Array, Array]:
        """Sizes from 0, their prices (see `_alone`), and the factors of their programs and the one for larger loads."""
        sizes, first = self.buckets.alone, len(self.buckets.decode)
        seconds = self._unpadded(sizes)
        seconds[0] = 0.0
        return sizes, seconds, self._speeds[first : first + len(sizes) + 1]  # the factor of size 0 does not matter

    def _unpadded(self, tokens: Array) -> Array:
        coefficients = self.coefficients
        result: Array = coefficients.fixed + coefficients.prefill * tokens
        if coefficients.w_moe:
            result = result + coefficients.w_moe * (1.0 - (1.0 - coefficients.p_moe) ** tokens)
        return result

    @cached_property
    def _speeds(self) -> Array:
        return np.ones(self.buckets.programs) if self.factors is None else np.array(self.factors)
