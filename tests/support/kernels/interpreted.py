"""Tests that run Hopper kernels on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.interpret import Interpret, interpreter, watch_races

needs_interpreter = pytest.mark.skipif(
    not compat.DETECTS_RACES,
    reason=f"the interpreter of jax {jax.__version__} sees no races and knows no warp products; 0.11 does",
)


@contextmanager
def without_races() -> Iterator[Interpret]:
    """The `interpret` argument of kernels; wait for their results within. None of them raced, where jax can tell."""
    try:
        if not compat.DETECTS_RACES:
            yield interpreter()
            return
        with watch_races() as races:
            yield interpreter(detect_races=True)
    except BaseException:
        compat.reset_interpreter()  # or the next kernel finds the threads of this one
        raise
    assert not races.found(), "races"
