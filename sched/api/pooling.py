"""Pooling of a prompt: one vector from the hidden states of its positions, instead of text."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

PoolingType = Literal["last", "mean"]
POOLINGS = LAST, MEAN = get_args(PoolingType)

Sum = npt.NDArray[np.float32]  # of hidden states [E]


class Pooled:
    """The sum of a prompt's hidden states, over its chunks. Writer: the Scheduler that owns the request.

    For `mean`, every position counts once. A prompt is computed from its beginning again if its KV
    was dropped, and so is the sum.
    """

    __slots__ = ("_kind", "_sum", "positions")

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._sum: npt.NDArray[Any] | None = None  # [E] float64
        self.positions = 0  # that are in the sum

    def add(self, start: int, length: int, part: Sum) -> None:
        """Add the sum [E] over positions [start, start + length); for `last`, it is the last one's state."""
        if self._kind == LAST or start == 0 or self._sum is None:
            self._sum = part.astype(np.float64)
        else:
            assert start == self.positions, f"positions {self.positions} to {start} are in no sum"
            self._sum += part
        self.positions = 1 if self._kind == LAST else start + length

    def vector(self) -> bytes:
        """Return the pooled vector as little-endian float32; b"" if nothing was added, as in a replay."""
        return b"" if self._sum is None else (self._sum / self.positions).astype("<f4").tobytes()
