"""Kairos's lookup table of decode step times by batch size and longest sequence (section 3.2, Algorithm 3)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load, PerfModel
from .fit import nonnegative
from .online import running_rate

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 24576, 32768, 49152, 65536, 81920, 98304, 114688, 131072)
PROFILING_RUNS = 100  # "the mean decode step time over 100 profiling runs per configuration"


class TableModel:
    """LUT[batch size, longest context], updated by measured steps. A `PerfModel`.

    An entry is the historical mean of its profiling runs and of every later step nearest to it (Algorithm
    3, line 24), or with `ewma` a moving average that forgets. Between entries it interpolates bilinearly,
    or takes the nearest one. Entries never seen follow a + b*batch + c*length, fitted to those seen.
    Prefill takes prompt tokens / mu as in Kairos, but mu counts processed tokens, where line 22 of the
    paper counts whole prompts. Writer: the Scheduler that observes steps.
    """

    def __init__(
        self,
        batches: Sequence[int] = BATCHES,
        lengths: Sequence[int] = LENGTHS,
        *,
        prefill_rate: float,
        ewma: float | None = None,
        lookup: Literal["bilinear", "nearest"] = "bilinear",
    ) -> None:
        for name, axis in (("batches", batches), ("lengths", lengths)):
            if len(axis) < 2 or list(axis) != sorted(set(axis)) or axis[0] < 1:
                raise InvalidValue(f"{name}={list(axis)} must be two or more positive numbers in order", name)
        if ewma is not None and not 0 < ewma <= 1:
            raise InvalidValue(f"{ewma=} must be above 0 and at most 1", "ewma")
        if not prefill_rate > 0:
            raise InvalidValue(f"{prefill_rate=} must be positive tokens per second", "prefill_rate")
        self._batches = np.array(batches, dtype=float)
        self._lengths = np.array(lengths, dtype=float)
        self._axes = self._batches.tolist(), self._lengths.tolist()
        self._seconds = np.full((len(batches), len(lengths)), np.nan)  # measured; NaN if never seen
        self._runs = np.zeros(self._seconds.shape)
        self._filled = np.zeros(self._seconds.shape)  # measured, or fitted if never seen
        self._unseen = self._seconds.size
        self._prefill_rate = prefill_rate
        self._ewma = ewma
        self._lookup = lookup
        self.version = 0

    @classmethod
    def profiled(
        cls,
        model: PerfModel,
        batches: Sequence[int] = BATCHES,
        lengths: Sequence[int] = LENGTHS,
        *,
        runs: int = PROFILING_RUNS,
        ewma: float | None = None,
        lookup: Literal["bilinear", "nearest"] = "bilinear",
    ) -> TableModel:
        """Fill a table from a model: `runs` runs per entry, with all rows of a batch equally long."""
        table = cls(batches, lengths, prefill_rate=model.prefill_rate, ewma=ewma, lookup=lookup)
        rows, longest = np.meshgrid(table._batches, table._lengths, indexing="ij")
        table._seconds = np.asarray(model.decode_times(rows, longest, rows * longest), dtype=float)
        table._runs[:] = runs
        table._unseen = 0
        table._filled = table._seconds
        return table

    @classmethod
    def known(
        cls,
        batches: Sequence[int],
        lengths: Sequence[int],
        seconds: Sequence[Sequence[float]],
        *,
        lookup: Literal["bilinear", "nearest"],
        prefill_rate: float,
        version: int,
    ) -> TableModel:
        """Create a table from what `filled` returns."""
        table = cls(batches, lengths, prefill_rate=prefill_rate, lookup=lookup)
        table._filled, table.version = np.array(seconds, dtype=float), version
        return table

    def filled(self) -> tuple[list[float], list[float], str, list[list[float]]]:
        """Return the batches, the lengths, the kind of lookup, and the seconds by batch and length."""
        return *self._axes, self._lookup, self._filled.tolist()

    def add(self, points: Iterable[tuple[int, int, float]]) -> None:
        """Add measured (batch, longest context, seconds) to a table that is filled by measurement."""
        self.version += 1
        for batch, longest, seconds in points:
            self._update(batch, longest, seconds, refill=False)
        self._refill()

    @property
    def prefill_rate(self) -> float:
        return self._prefill_rate

    def step_time(self, load: Load) -> float:
        seconds = load.prefill / self._prefill_rate
        if load.decode:
            row, along = _place_one(self._axes[0], load.decode)
            column, across = _place_one(self._axes[1], load.longest)
            seconds += float(self._between(row, along, column, across))
        return seconds

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        return self._look(np.asarray(rows, dtype=float), np.asarray(longest, dtype=float))

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        result: Array = tokens / self._prefill_rate
        return result

    def observe(self, load: Load, seconds: float) -> None:
        if not 0 < seconds < float("inf"):
            return
        self.version += 1
        if load.prefill and not load.decode:
            self._prefill_rate = running_rate(self._prefill_rate, load.prefill, seconds)
        elif load.decode and not load.prefill:
            self._update(load.decode, load.longest, seconds, refill=True)

    def _look(self, rows: Array, longest: Array) -> Array:
        """Interpolate inside the table. Beyond its edges, return the value at the edge."""
        row, along = _place(self._batches, rows)
        column, across = _place(self._lengths, longest)
        between: Array = self._between(row, along, column, across)
        return between

    def _between(self, row: Any, along: Any, column: Any, across: Any) -> Any:
        """Interpolate `along` between a row and the next and `across` between a column and the next, elementwise."""
        filled = self._filled
        if self._lookup == "nearest":
            return filled[row + (along >= 0.5), column + (across >= 0.5)]
        short = filled[row, column] * (1 - along) + filled[row + 1, column] * along
        long = filled[row, column + 1] * (1 - along) + filled[row + 1, column + 1] * along
        return short * (1 - across) + long * across

    def _update(self, batch: int, longest: int, seconds: float, *, refill: bool) -> None:
        row = int(np.argmin(np.abs(self._batches - batch)))
        column = int(np.argmin(np.abs(self._lengths - longest)))
        runs = self._runs[row, column]
        if runs == 0:
            self._seconds[row, column] = seconds
            self._unseen -= 1
        else:
            weight = self._ewma or 1 / (runs + 1)
            self._seconds[row, column] += weight * (seconds - self._seconds[row, column])
        self._runs[row, column] = runs + 1
        self._filled[row, column] = self._seconds[row, column]
        if refill and self._unseen and not runs:
            self._refill()

    def _refill(self) -> None:
        """Fill entries never seen from a fit to those that were."""
        seen = self._runs > 0
        if not seen.any():
            return
        rows, longest = np.meshgrid(self._batches, self._lengths, indexing="ij")
        table = np.stack([np.ones_like(rows), rows, longest], axis=-1)
        solution = nonnegative(table[seen], self._seconds[seen])
        least = np.min(self._seconds[seen])  # the fit must not fall below every measured step
        self._filled = np.where(seen, self._seconds, np.maximum(table @ solution, least))


def _place(axis: Array, values: Array) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], Array]:
    """Return the interval of `axis` that holds each value, and the position in it, 0 to 1."""
    index = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    share: Array = np.clip((values - axis[index]) / (axis[index + 1] - axis[index]), 0.0, 1.0)
    return index, share


def _place_one(axis: Sequence[float], value: float) -> tuple[int, float]:
    """As `_place`, for one value. Numpy takes ten times as long, and policies ask once per step."""
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, min(max((value - axis[index]) / (axis[index + 1] - axis[index]), 0.0), 1.0)
