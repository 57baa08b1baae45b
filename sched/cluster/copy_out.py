"""Copies of finished requests' pages from the pools to a store, a few at a time.

Pages stay in the prefix cache of their instance when a request ends, until they are evicted. They
are copied before that, beside the steps: at most one batch per instance at a time, and pages are
skipped, not waited for, if too many wait to be copied or their instance has evicted them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from ..api.kv_source import KVStore, PageCopy
from ..api.request import Request
from ..instance.loop import Core

BATCH = 16  # pages per copy
MOST = 4096  # pages that wait to be copied, per instance


class CopyOut:
    """All copies from the instances of a cluster to its store. Writer: the Cluster, in its event loop.

    `spawn` starts a task.
    """

    def __init__(
        self,
        store: KVStore | None,
        cores: Sequence[Core],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._store = store
        self._cores = cores
        self._spawn = spawn
        self._waiting: dict[str, deque[PageCopy]] = {}  # by instance, while one of its batches is copied
        self._copying = set[asyncio.Task[None]]()
        self.pages = 0  # given to the store
        self.skipped = 0

    async def idle(self) -> None:
        """Wait until no page waits to be copied, or is being copied."""
        while self._copying:
            await asyncio.wait(self._copying)

    def finished(self, request: Request) -> None:
        """Copy the pages of a request that has ended, from the instance that has most of them."""
        store = self._store
        if store is None or not request.digests:
            return
        digests = request.digests
        core = max(self._cores, key=lambda core: core.scheduler.blocks.match(digests))
        matched = core.scheduler.blocks.match(digests)
        new = [at for at in range(matched) if digests[at] not in store]
        if not new:
            return
        copies = [PageCopy(digests[at], digests[at - 1] if at else b"", cost) for at, cost in self._costs(core, new)]
        waiting = self._waiting.get(core.name)
        if waiting is None:
            waiting = self._waiting[core.name] = deque()
            task = self._spawn(self._copy(store, core, waiting))
            self._copying.add(task)
            task.add_done_callback(self._copying.discard)
        room = MOST - len(waiting)
        waiting += copies[:room]
        self.skipped += max(0, len(copies) - room)

    def _costs(self, core: Core, pages: Sequence[int]) -> list[tuple[int, float]]:
        """Return the seconds per page in a full chunk after the tokens before it."""
        scheduler = core.scheduler
        size, chunk = scheduler.limits.page_size, scheduler.limits.tokens
        before = np.array(pages, np.float64) * size
        seconds = scheduler.perf.prefill_times(np.full(len(pages), float(chunk)), before, chunk) * size / chunk
        return list(zip(pages, seconds.tolist(), strict=True))

    async def _copy(self, store: KVStore, core: Core, waiting: deque[PageCopy]) -> None:
        """Copy what waits, batch by batch."""
        try:
            while waiting:
                batch = [waiting.popleft() for _ in range(min(BATCH, len(waiting)))]
                await self._copied(store, core, batch)
        finally:
            del self._waiting[core.name]

    async def _copied(self, store: KVStore, core: Core, batch: Sequence[PageCopy]) -> None:
        """Copy the pages of a batch that are still in the pool and not in the store."""
        blocks = core.scheduler.blocks
        new = {copy.digest: copy for copy in batch if copy.digest not in store and blocks.match((copy.digest,))}
        self.skipped += sum(copy.digest not in store for copy in batch) - len(new)
        copies, grain = list(new.values()), store.grain
        pages = [page for copy in copies for page in blocks.find((copy.digest,))]
        try:
            kv_buffers = [core.executor.export_kv(pages[at : at + grain]) for at in range(0, len(pages), grain)]
            await store.store(copies, kv_buffers)
        except Exception:  # the pool is lost, or a device failed: later requests compute these pages again
            self.skipped += len(copies)
        else:
            self.pages += len(copies)
