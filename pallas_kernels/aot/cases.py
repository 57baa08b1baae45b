"""What the compile gate compiles: a kernel's module lists its own cases, the gate collects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Case:
    """One program to compile for a device that is not there.

    `arguments` are shapes and dtypes; the gate puts shardings on them. `donate` names those by position that the
    program changes in place: it must alias all their bytes. `needs` names instructions that the machine code must
    contain: "wgmma", "mma", "tma". `least_jax` keeps a case from versions that lack what it uses.
    """

    name: str  # e.g. "decode wgmma bf16 page64 q1"
    program: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donate: tuple[int, ...] = ()
    needs: frozenset[str] = frozenset()
    least_jax: tuple[int, int] = (0, 10)


def shapes(*pairs: tuple[Sequence[int], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments from (shape, dtype) pairs."""
    return tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in pairs)
