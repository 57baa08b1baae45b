"""Helpers for checks that run Hopper kernels on the host, or on a GPU if jax has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import jax
import numpy as np
import pytest

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.interpret import Interpret, interpreter, watch_races
from pallas_kernels.mosaic.spec import CORES

needs_interpreter = pytest.mark.skipif(
    not compat.DETECTS_RACES,
    reason=f"the interpreter of jax {jax.__version__} has no race detection and no warp-level products; 0.11 has",
)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def cores() -> int:
    """Return the cores that a config is chosen for: few for the interpreter, where each block is a few threads."""
    return CORES if on_gpu() else 4


def haste() -> dict[str, int | bool] | None:
    """Return compiler options without optimization for the interpreter, where compiling takes most of the time."""
    return None if on_gpu() else {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@cache
def _fresh() -> int:
    drawn = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed of this session: {drawn}")
    return drawn


def seed(fixed: int) -> int:
    """Return `fixed` for the interpreter, whose runs repeat, and another seed in every session on a GPU."""
    return fixed + _fresh() if on_gpu() else fixed


@contextmanager
def without_races(*, in_order: bool = False) -> Iterator[Interpret]:
    """Yield the `interpret` argument of kernels, and check that none of them raced; wait for results inside.

    On a GPU the kernels are compiled, and races are not watched. `in_order`: see `watch_races`.
    """
    if on_gpu():
        yield None
        return
    try:
        if not compat.DETECTS_RACES:
            yield interpreter()
            return
        with watch_races(in_order=in_order) as races:
            yield interpreter(detect_races=True)
    except BaseException:
        compat.reset_interpreter()  # otherwise the next kernel finds the threads of this one
        raise
    assert not races.found(), "races"
