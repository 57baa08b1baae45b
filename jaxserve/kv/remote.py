"""The KV of other engine processes as a KVSource: a request says where the pages of its prompt are."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

from jaxserve.engine.memory.transfer import KVBuffer
from jaxserve.kv.client import Destination, KVClient, WrongKV
from jaxserve.kv.direct import Direct
from jaxserve.kv.share import Transport
from jaxserve.sched.api.errors import JaxserveError
from jaxserve.sched.api.request import Request
from jaxserve.wire.address import Address

log = logging.getLogger(__name__)

ASIDE = 2.0  # seconds for which a process is not asked again after a fault
LEARNING = 0.1  # weight of the last fetch in its predicted seconds, in each of their two parts
FETCHES = 4  # at a time, of pages that are there: each holds a piece that is not in a pool yet


class RemoteKV:
    """A KVSource. `find`, `seconds` and `fetch` are called on the engine's loop, and the rest runs on `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        key: bytes,
        destination: Destination,
        direct: Direct | None,
        transport: Transport,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pages = 0  # that came and were right
        self.bytes = 0
        self.fetch_seconds = 0.0
        self.fallbacks = 0  # fetches that failed, after which the engine computes the tokens itself
        self._loop = loop
        self._key, self._destination, self._direct, self._transport = key, destination, direct, transport
        self._now = now
        self._clients: dict[str, asyncio.Task[KVClient]] = {}
        self._aside: dict[str, float] = {}  # processes that failed, until when they are not asked
        self._each, self._page = 0.0, 0.0  # seconds of a fetch: for itself, and for each of its pages
        self._fetches = asyncio.Semaphore(FETCHES)
        self._lock = threading.Lock()  # between a new fetch and the end of `loop`
        self._closed = False  # guarded by _lock

    def find(self, request: Request, digests: Sequence[bytes]) -> int:
        """Return how many leading pages to expect at the address that the request names: all, unless it says less."""
        holder, tokens = request.asked.kv_from, request.asked.kv_tokens
        if not digests or self._closed or not holder or self._aside.get(holder, 0.0) > self._now():
            return 0
        if not tokens:
            return len(digests)
        there = tokens // self._destination.layout.page_size
        return max(0, min(len(digests), there - request.digests.index(digests[0])))

    def seconds(self, pages: int) -> float:
        """Predict the seconds to fetch this many pages, from the fetches so far."""
        return self._each + pages * self._page

    async def fetch(self, request: Request, digests: Sequence[bytes], start: int, wait: float = 0.0) -> KVBuffer | None:
        """Return the KV of pages [start, n); None if they are not there within `wait` seconds, or are wrong."""
        with self._lock:
            if self._closed:
                return None
            work = self._fetch(request.asked.kv_from, digests[start:], wait)
            fetching = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(fetching)

    async def _fetch(self, address: str, digests: Sequence[bytes], wait: float) -> KVBuffer | None:
        try:
            client = await self._client(address)
            kv_buffer = None
            # Pages that are not computed yet are waited for outside of `_fetches`: those that are must not queue.
            if not wait or await client.there(digests[0], wait):
                async with self._fetches:
                    began = self._now()
                    kv_buffer = await client.pages(digests)
        except JaxserveError as error:
            self.fallbacks += 1
            self._fail(address, error)
            return None
        if kv_buffer is None:
            self.fallbacks += 1
            return None
        self._note(kv_buffer, self._now() - began)
        return kv_buffer

    def _note(self, kv_buffer: KVBuffer, seconds: float) -> None:
        self.pages += kv_buffer.pages
        self.fetch_seconds += seconds
        self.bytes += sum(
            array.nbytes * count // array.shape[2] for count, piece in kv_buffer.pieces for array in piece
        )
        error, weight = seconds - self.seconds(kv_buffer.pages), LEARNING if self._each else 0.5
        self._each = max(0.0, self._each + weight * error)
        self._page = max(0.0, self._page + weight * error / kv_buffer.pages)

    async def _client(self, address: str) -> KVClient:
        """Return the connection to a process; requests that need it at the same time share one."""
        connecting = self._clients.get(address)
        if connecting is None or (connecting.done() and connecting.result().gone is not None):
            client = KVClient.connect(
                Address.parse(address), self._key, self._destination, self._direct, self._transport
            )
            connecting = self._clients[address] = asyncio.ensure_future(client)
        return await asyncio.shield(connecting)

    def _fail(self, address: str, error: JaxserveError) -> None:
        """Leave a process alone for a while; the next connection compares layouts anew."""
        level = logging.ERROR if isinstance(error, WrongKV) else logging.WARNING
        log.log(level, "KV pages of %s are computed here instead: %s", address, error)
        self._aside[address] = self._now() + ASIDE
        connecting = self._clients.pop(address, None)
        if connecting is not None and connecting.done() and connecting.exception() is None:
            connecting.result().close()

    async def close(self) -> None:
        """Disconnect, and fetch no more; runs on `loop`."""
        with self._lock:
            self._closed = True
        for connecting in self._clients.values():
            connecting.cancel()
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()
