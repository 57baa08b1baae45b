"""The cost of code as the number of calls that it makes, which no other process and no slow machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(work: Callable[[], Any]) -> int:
    """Return how many functions, of Python and of C, `work` calls."""
    count = [0]

    def note(frame: FrameType, event: str, argument: Any) -> None:
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count[0]
