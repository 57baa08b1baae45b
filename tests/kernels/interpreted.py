"""Tests that run Hopper kernels on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from pallas_kernels import compat
from pallas_kernels.interpret import Interpret, interpreter, races_found

needs_interpreter = pytest.mark.skipif(
    not compat.DETECTS_RACES,
    reason=f"the interpreter of jax {jax.__version__} sees no races and knows no warp products; 0.11 does",
)


@contextmanager
def without_races() -> Iterator[Interpret]:
    """The `interpret` argument of kernels. Where this jax can tell, no two accesses of the last of them raced."""
    try:
        yield interpreter(detect_races=compat.DETECTS_RACES)
    except BaseException:
        compat.reset_interpreter()  # or the next kernel finds the threads of this one
        raise
    assert not (compat.DETECTS_RACES and races_found())
