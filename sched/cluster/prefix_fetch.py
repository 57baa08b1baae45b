"""Prefix fetches: KV pages from outside enter the prefix cache of an instance before a request is scheduled.

A request for which a source has more leading pages than the cache of its instance is held until
they have been fetched, if that is predicted to be faster than to compute their tokens. Pages enter
the pool as a KV write-back does (`kv_transfer.py`), so the request then finds them as any other
prefix hit. Whatever a source does, the request goes to the scheduler of an instance, which computes
what is missing. It is held no longer than the computation would take, so a source that fails costs
at most that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np

from ..api.errors import StepFailed
from ..api.kv_source import KVSource
from ..api.plan import KVBuffer
from ..api.policy import Role
from ..api.request import Request
from ..instance.loop import Core

LEAST_PATIENCE = 0.02  # seconds: timers and threads of a busy host may take that long
LEARNING = 0.1  # weight of the last import in the predicted seconds per page


class Held:
    """A request that waits for its pages. Writer: PrefixFetch."""

    def __init__(self, request: Request, core: Core, patience: float) -> None:
        self.request = request
        self.core = core
        self.patience = patience
        self.role = core.scheduler.role
        self.began = core.executor.now()
        self.ahead = False  # the request itself comes later
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # nothing more is fetched for it

    @property
    def belongs(self) -> bool:
        """Whether its instance still takes prompts, or decoded already when it was placed there."""
        scheduler = self.core.scheduler
        return not scheduler.hung and (scheduler.role is self.role or scheduler.role is not Role.DECODE)

    async def either(self, other: asyncio.Future[Any]) -> None:
        """Wait for another future, or until it waits no longer."""
        await asyncio.wait([other, self.over], return_when=asyncio.FIRST_COMPLETED)


class PrefixFetch:
    """All prefix fetches of a cluster. Writer of Held, in the event loop of the Cluster.

    `spawn` starts a task; an exception in it fails the cluster. `ready` is called once for every
    held request that is not cancelled, with its instance and whether it still belongs there.
    """

    def __init__(
        self,
        sources: Sequence[KVSource],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        ready: Callable[[Request, Core, bool], None],
    ) -> None:
        self._sources = tuple(sources)
        self._spawn = spawn
        self._ready = ready
        self._held: dict[int, Held] = {}
        self._coming: dict[tuple[str, bytes], asyncio.Future[None]] = {}  # by instance and first page of a fetch
        self._import = 0.0  # learned seconds per page from a buffer into the pool
        self.requests = 0  # requests that were held
        self.pages = 0  # pages that arrived, and are in a prefix cache since
        self.unused = 0  # pages that arrived in vain: computed or evicted meanwhile, no room, or a failed import
        self.failures = 0  # fetches without a page, and imports that raised or found no room
        self.seconds = 0.0  # total time for which requests were held

    def __len__(self) -> int:
        """Return the number of held requests."""
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return (held.request for held in self._held.values())

    def waiting(self, core: Core) -> int:
        """Return the number of requests that are held for an instance."""
        return sum(held.core is core for held in list(self._held.values()))  # read from any thread

    def hold(self, request: Request, core: Core) -> bool:
        """Hold a request that is to be scheduled on `core`, if fetching pages for it is worth it."""
        if not self._sources:
            return False
        digests = core.scheduler.sought(request)
        at = core.scheduler.blocks.match(digests)
        if self._best(request, core, digests, at, self._sources) is None:
            return False
        held = Held(request, core, max(LEAST_PATIENCE, _computing(request, core, at)))
        self._held[request.id] = held
        self.requests += 1
        self._spawn(self._bring(held, digests, list(self._sources)))
        return True

    def add_source(self, source: KVSource) -> None:
        """Fetch pages from one more source from now on."""
        self._sources = (*self._sources, source)

    def ahead(self, request: Request, core: Core, source: KVSource, patience: float) -> None:
        """Fetch pages from `source` for a request that comes later: `request` is like it, and is not scheduled."""
        held = Held(request, core, patience)
        held.ahead = True
        self._spawn(self._bring(held, core.scheduler.sought(request), [source]))

    def cancel(self, id: int) -> Request | None:
        """Stop holding a request, and return it. None if it is not held."""
        held = self._held.pop(id, None)
        if held is None:
            return None
        self._stop(held)
        return held.request

    def release(self, core: Core) -> None:
        """Stop holding the requests of an instance that hangs."""
        for held in list(self._held.values()):
            if held.core is core:
                self._end(held)

    def _stop(self, held: Held) -> None:
        held.over.set_result(None)
        self.seconds += held.core.executor.now() - held.began

    def _end(self, held: Held) -> None:
        """Hand a request back. Does nothing if that has happened."""
        if held.ahead and not held.over.done():
            held.over.set_result(None)
        elif self._held.get(held.request.id) is held:
            del self._held[held.request.id]
            self._stop(held)
            self._ready(held.request, held.core, held.belongs)

    def _best(
        self, request: Request, core: Core, digests: Sequence[bytes], at: int, sources: Sequence[KVSource]
    ) -> tuple[KVSource, int] | None:
        """Return the source that saves the most time from page `at` on, and the page that it leads to.

        None if computing the tokens is predicted to be as fast.
        """
        best, least = None, _computing(request, core, at)
        for source in sources if at < len(digests) else ():
            pages = min(source.find(request, digests[at:]), len(digests) - at)
            if pages > 0:
                fetching = source.seconds(pages) + pages * self._import
                seconds = fetching + _computing(request, core, at + pages)
                if seconds < least:
                    best, least = (source, at + pages), seconds
        return best

    async def _bring(self, held: Held, digests: Sequence[bytes], sources: list[KVSource]) -> None:
        """Fetch pages until no source has more that are worth it, and then hand the request back."""
        core = held.core
        timer = asyncio.get_running_loop().call_later(held.patience, self._end, held)
        try:
            while not held.over.done():
                at = core.scheduler.blocks.match(digests)
                best = self._best(held.request, core, digests, at, sources)
                if best is None:
                    break
                place = core.name, digests[at]
                if place in self._coming:
                    await held.either(self._coming[place])  # another request fetches the same pages
                elif not await self._step(held, place, digests[: best[1]], at, best[0], sources):
                    break
        finally:
            timer.cancel()
        self._end(held)

    async def _step(
        self,
        held: Held,
        place: tuple[str, bytes],
        digests: Sequence[bytes],
        at: int,
        source: KVSource,
        sources: list[KVSource],
    ) -> bool:
        """Fetch pages from page `at` on, as many as the source gives at once. Returns whether to go on."""
        coming = self._coming[place] = asyncio.get_running_loop().create_future()
        try:
            kv_buffer = await self._fetched(held, source, digests, at)
            if kv_buffer is not None:
                return await self._imported(held, digests[: at + kv_buffer.pages], at, kv_buffer)
            self.failures += not held.over.done()
            sources.remove(source)
            return True
        finally:
            del self._coming[place]
            coming.set_result(None)

    async def _fetched(self, held: Held, source: KVSource, digests: Sequence[bytes], at: int) -> KVBuffer | None:
        """Ask a source for pages. None if it fails, has none or too many, or the request waits no longer."""
        fetching = asyncio.ensure_future(source.fetch(held.request, digests, at))
        fetching.add_done_callback(_retrieve)
        try:
            await held.either(fetching)
        finally:
            fetching.cancel()
        if not fetching.done() or fetching.cancelled() or fetching.exception() is not None:
            return None
        kv_buffer = fetching.result()
        return kv_buffer if kv_buffer is not None and 0 < kv_buffer.pages <= len(digests) - at else None

    async def _imported(self, held: Held, digests: Sequence[bytes], at: int, kv_buffer: KVBuffer) -> bool:
        """Put pages [at, len(digests)) into the pool. Returns False if there is no room or the import raised.

        The import is never cancelled, since it may be writing its pages.
        """
        scheduler, executor, began = held.core.scheduler, held.core.executor, held.core.executor.now()
        if scheduler.blocks.match(digests) != at:
            self.unused += kv_buffer.pages
            return True  # other requests have computed or evicted some since: look again
        id = ~held.request.id  # never that of a write-back
        returned = scheduler.reserve_write_back(id, digests)
        if returned is None:
            self.failures += 1
            self.unused += kv_buffer.pages
            return False
        try:
            await executor.import_kv(kv_buffer, returned.pages[returned.cached :])
        except Exception as error:
            self.failures += not isinstance(error, StepFailed)  # a lost pool says nothing about the source
            self.unused += kv_buffer.pages
            scheduler.finish_write_back(id, False)
            return False
        scheduler.finish_write_back(id, True)
        held.core.wake()
        self.pages += kv_buffer.pages
        self._import += LEARNING * ((executor.now() - began) / kv_buffer.pages - self._import)
        return True


def _retrieve(fetching: asyncio.Future[Any]) -> None:
    """Mark the error of a fetch as seen: it may come after the request has stopped waiting."""
    if not fetching.cancelled():
        fetching.exception()


def _computing(request: Request, core: Core, pages: int) -> float:
    """Predict the seconds to compute the known tokens of a request after this many pages, alone."""
    scheduler, context = core.scheduler, pages * core.scheduler.limits.page_size
    left, before = np.array([float(request.known - context)]), np.array([float(context)])
    return float(scheduler.perf.prefill_times(left, before, scheduler.limits.tokens)[0])
