"""Vectors of texts, from pooled hidden states: embeddings, and how similar two of them are."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from jaxserve.errors import InvalidValue, short
from jaxserve.sched.api.params import SamplingParams

T = TypeVar("T")
Vector = npt.NDArray[np.float32]  # [E], or [dimensions]


def pooling_params(pooling: str) -> SamplingParams:
    """Return the parameters of a request for a vector: "last" or "mean". Raises InvalidValue."""
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise InvalidValue unless vectors of `size` numbers can be cut to `dimensions`."""
    if dimensions is not None and not 1 <= dimensions <= size:
        allowed = f"1 to {size}, the hidden size of this model"
        raise InvalidValue(f"dimensions={short(dimensions)} must be {allowed}", "dimensions")


def vector_of(pooled: bytes) -> Vector:
    """Return the vector [E] of the `pooled` bytes of a delta or piece."""
    return np.frombuffer(pooled, "<f4")


def finished(vector: Vector, dimensions: int | None, normalize: bool) -> Vector:
    """Cut a vector to its first `dimensions` numbers, as Matryoshka models allow, and scale it to length 1."""
    cut = vector[:dimensions].astype(np.float64)
    if normalize:
        cut /= np.linalg.norm(cut) or 1.0  # the vector 0 stays
    return cut.astype(np.float32)


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is 0."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(a @ b / ((np.linalg.norm(a) * np.linalg.norm(b)) or 1.0))


def relevance(vector: Vector, head: bytes, activated: bool = True) -> float:
    """Return the score of the hidden state [E] of a pair of texts, from 0 to 1 if it is `activated`."""
    score = float(vector.astype(np.float64) @ np.frombuffer(head, "<f4").astype(np.float64))
    return float(0.5 + 0.5 * np.tanh(score / 2)) if activated else score  # the sigmoid, without overflow


def paired(some: list[T], others: list[T], names: tuple[str, str]) -> list[tuple[T, T]]:
    """Pair one entry with each of the others, or two lists entry by entry. Raises InvalidValue, naming the field."""
    if len(some) not in (1, len(others)):
        counts = f"{names[0]} has {len(some)} entries and {names[1]} has {len(others)}"
        raise InvalidValue(f"{counts}: {names[0]} must be one text, or as many as {names[1]}", names[0])
    return list(zip(some if len(some) == len(others) else some * len(others), others, strict=True))
