"""Tests of durations on machines that do other work too."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")
ATTEMPTS = 5
PATIENCE = 120.0  # seconds: more than any machine needs, so that only what never comes fails


def until(reached: Callable[[], object], said: Callable[[], object] = lambda: "") -> None:
    """Wait until a condition holds; fails with what `said` returns if it never does."""
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, said()
        time.sleep(0.005)


class Late(AssertionError):
    """Raised by `in_time`."""


def in_time(held: bool, message: str = "") -> None:
    """Fail a test because of a duration that other processes may have changed. Use `assert` for all else."""
    if not held:
        raise Late(message)


def once_in_time(test: Callable[P, None]) -> Callable[P, None]:
    """Let a test pass if its durations hold in one of five attempts, and everything else in each.

    Other processes delay an event, or the observation of one; an attempt without them shows the code under test.
    """

    @wraps(test)
    def attempts(*args: P.args, **kwargs: P.kwargs) -> None:
        for left in reversed(range(ATTEMPTS)):
            try:
                return test(*args, **kwargs)
            except Late:
                if not left:
                    raise

    return attempts
