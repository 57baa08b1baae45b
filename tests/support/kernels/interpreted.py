"""Helpers for tests that run Hopper kernels on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.interpret import Interpret, interpreter, watch_races

needs_interpreter = pytest.mark.skipif(
    not compat.DETECTS_RACES,
    reason=f"the interpreter of jax {jax.__version__} has no race detection and no warp-level products; 0.11 has",
)


@contextmanager
def without_races() -> Iterator[Interpret]:
    """Yield the `interpret` argument of kernels, and check that none of them raced; wait for results inside."""
    try:
        if not compat.DETECTS_RACES:
            yield interpreter()
            return
        with watch_races() as races:
            yield interpreter(detect_races=True)
    except BaseException:
        compat.reset_interpreter()  # otherwise the next kernel finds the threads of this one
        raise
    assert not races.found(), "races"
