"""What decoding added to a request's KV, on its way back to where the prompt was computed.

The next round of a conversation holds the answer of the last one. Its prompt comes to a prefill instance, which has
computed the rounds' prompts but none of their answers; these would be computed again. Nobody waits for the copy: it
takes pages that nobody is waiting for, and what cannot be had, or fails on the way, is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ..api.errors import StepFailed
from ..api.plan import KvParcel
from ..api.request import Request
from ..instance.kv_manager import Returned
from ..instance.loop import Core


class Returns:
    """All KV on its way back in a cluster. Writer: the Mover, in the Cluster's event loop."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], wanted: bool) -> None:
        self._spawn = spawn
        self._wanted = wanted
        self._sources: dict[int, Core] = {}
        self.pages = 0  # that came back

    def came_from(self, id: int, source: Core) -> None:
        if self._wanted:
            self._sources[id] = source

    def forget(self, id: int) -> None:
        self._sources.pop(id, None)

    def give_back(self, core: Core, request: Request) -> None:
        """A request has finished on `core`: its full pages are still findable there."""
        source = self._sources.pop(request.id, None)
        if source is None:
            return
        pages = core.scheduler.blocks.find(request.digests)
        returned = source.scheduler.receive(request.id, request.digests[: len(pages)])
        if returned is None:
            return
        try:
            parcel = core.executor.export_kv(pages[returned.cached :])
        except StepFailed:  # the step behind the request's last one has raised, and its pool is gone
            source.scheduler.keep(request.id, False)
            return
        self._spawn(self._carry(request.id, source, returned, parcel))

    async def _carry(self, id: int, source: Core, returned: Returned, parcel: KvParcel) -> None:
        try:
            await source.executor.import_kv(parcel, returned.pages[returned.cached :])
        except Exception:
            arrived = False  # it is computed again when it is wanted
        else:
            arrived = True
            self.pages += len(returned.pages) - returned.cached
        source.scheduler.keep(id, arrived)
        source.wake()
