"""KV sources for tests in virtual time, which do what a list of behaviors says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxserve.sched.api.errors import JaxserveError
from jaxserve.sched.api.request import Request
from jaxserve.sched.sim.executor import SimKVBuffer

BEHAVIORS = ("all", "short", "late", "none", "empty", "too many", "raises", "never", "deaf")


class Source:
    """A source that says it has every page, and behaves at its n-th fetch as `behaviors` says, in turn."""

    def __init__(self, behaviors: Sequence[str] = ("all",), seconds: float = 1e-5, pages: int = 1 << 30) -> None:
        """seconds: for a page, predicted and taken. pages: how many leading ones it says that it has."""
        self.behaviors = behaviors
        self.pages = pages
        self.each = seconds
        self.asked: list[tuple[int, int, int]] = []  # request, start, end
        self.given = 0  # pages of valid answers

    def find(self, request: Request, digests: Sequence[bytes]) -> int:
        return min(self.pages, len(digests))

    def seconds(self, pages: int) -> float:
        return pages * self.each

    async def fetch(self, request: Request, digests: Sequence[bytes], start: int) -> SimKVBuffer | None:
        behavior = self.behaviors[len(self.asked) % len(self.behaviors)]
        self.asked.append((request.id, start, len(digests)))
        pages = len(digests) - start
        await asyncio.sleep({"late": 1.0, "never": 1e9}.get(behavior, self.seconds(pages)))
        if behavior == "raises":
            raise JaxserveError("injected: the source failed")
        while behavior == "deaf":
            try:
                await asyncio.sleep(50.0)
                return None
            except asyncio.CancelledError:
                pass
        count = {"none": None, "empty": 0, "short": 1, "too many": pages + 1}.get(behavior, pages)
        self.given += count if count is not None and count <= pages else 0
        return None if count is None else SimKVBuffer(count, None)
