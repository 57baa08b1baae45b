"""Copies of KV pages of an engine's prefix caches, for other processes. Everything here runs on the engine's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxserve.engine.memory.transfer import Piece
from jaxserve.engine.programs.checksum import checksums
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.sched.api.errors import StepFailed
from jaxserve.sched.instance.block_pool import BlockPool
from jaxserve.sched.instance.scheduler import Scheduler

LOOK = 0.002  # seconds between two looks for awaited pages


class Export(NamedTuple):
    """The first `pages` of the wanted pages, as one piece, and its checksums if they were asked for."""

    pages: int
    piece: Piece
    sums: list[jax.Array]


class KVPages:
    """Gives copies of pages. A page that is evicted meanwhile stays in a copy that was dispatched before."""

    def __init__(self, instances: Sequence[tuple[Scheduler, JaxExecutor]]) -> None:
        self._instances = instances
        self._awaited: dict[bytes, list[asyncio.Future[None]]] = {}
        self._looks = False  # whether `_look` is going to be called

    def _pools(self) -> list[tuple[BlockPool, JaxExecutor]]:
        return [(scheduler.blocks, executor) for scheduler, executor in self._instances]

    async def arrive(self, digest: bytes, seconds: float) -> bool:
        """Wait until a page is in a prefix cache; False if it is not within `seconds`."""
        if self._has(digest):
            return True
        loop = asyncio.get_running_loop()
        coming = loop.create_future()
        several = self._awaited.setdefault(digest, [])
        several.append(coming)
        if not self._looks:
            self._looks = True
            loop.call_later(LOOK, self._look, loop)
        try:
            async with asyncio.timeout(seconds):
                await coming
        except TimeoutError:
            return False
        finally:
            several.remove(coming)
            if not several and self._awaited.get(digest) is several:
                del self._awaited[digest]
        return True

    def _has(self, digest: bytes) -> bool:
        return any(blocks.match((digest,)) for blocks, _ in self._pools())

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look for all awaited pages at once, however many wait."""
        for digest in [digest for digest in self._awaited if self._has(digest)]:
            for coming in self._awaited.pop(digest):
                if not coming.done():
                    coming.set_result(None)
        self._looks = bool(self._awaited)
        if self._looks:
            loop.call_later(LOOK, self._look, loop)

    async def export(self, digests: Sequence[bytes], most: int, summed: bool) -> Export | None:
        """Copy up to `most` leading pages that are in one prefix cache; None if the first is not there."""
        blocks, executor = max(self._pools(), key=lambda pool: pool[0].match(digests))
        pages = blocks.find(digests)[: min(most, executor.largest_piece)]
        if not pages:
            return None
        try:
            ((count, piece),) = executor.export_kv(pages).pieces
        except StepFailed:  # the pool is lost
            return None
        return Export(count, piece, checksums(piece) if summed else [])
