"""The end that gives KV pages to other engine processes: by digest, as soon as they are computed."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxserve.engine.runtime.kv_pages import Export
from jaxserve.kv import messages
from jaxserve.kv.direct import Direct
from jaxserve.kv.layout import Layout
from jaxserve.wire.address import Address
from jaxserve.wire.connection import Connection, encode

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

MOST_BYTES = 32 << 20  # bytes of pages in an answer, but at least one page
PART_BYTES = 1 << 20  # bytes in a PagesPart: encoding one holds the interpreter lock for a fraction of a millisecond
COPIES = 4  # answers whose copies of pages may exist at a time
WAIT = 60.0  # most seconds that an answer waits for a page
OFFERED = 30.0  # seconds until an offer that is not pulled ends


class PageSource(Protocol):
    """The pages of an engine."""

    async def arrive(self, digest: bytes, seconds: float) -> bool: ...  # wait for a page
    async def export(self, digests: Sequence[bytes], most: int, summed: bool) -> Export | None: ...  # see KVPages


class KVServer:
    """Gives pages to processes with the key and the same layout. Everything here runs on one loop."""

    def __init__(
        self, source: PageSource, layout: Layout, shards: str, page_bytes: int, key: bytes, direct: Direct | None
    ) -> None:
        self.source = source
        self.layout = layout
        self.shards = shards
        self.direct = direct
        self.most = max(1, MOST_BYTES // page_bytes)
        self.copies = asyncio.Semaphore(COPIES)
        self.pages = 0  # given
        self._key = key
        self._clients = set[_Client]()
        self._unproved: dict[Connection, None] = {}
        self._listening: asyncio.Server | None = None

    async def start(self, address: Address) -> Address:
        self._listening, bound = await address.listen(self._accept)
        return bound

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        for connection in (*(client.connection for client in self._clients), *self._unproved):
            connection.close()

    def _accept(self) -> Connection:
        client = _Client(self)
        client.connection = Connection(
            self._key,
            "engine",
            opened=lambda connection: self._clients.add(client),
            received=client.received,
            lost=client.lost,
            unproved=self._unproved,
        )
        return client.connection

    def leave(self, client: _Client) -> None:
        self._clients.discard(client)


class _Client:
    """A process that takes pages. Writer: the loop of its KVServer."""

    connection: Connection

    def __init__(self, server: KVServer) -> None:
        self._server = server
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._taken: dict[int, asyncio.Event] = {}  # offers, until they have been pulled
        self._equal = False

    def received(self, frame: bytes) -> None:
        try:
            message = messages.decode_from_client(frame)
        except ValueError as error:
            self.connection.close(f"a message that cannot be decoded: {error}")
            return
        match message:
            case messages.CompareLayouts():
                self._greet(message)
            case messages.AwaitPage() | messages.GetPages() if self._equal:
                task = asyncio.ensure_future(self._answer(message))
                self._calls[message.call] = task
                task.add_done_callback(lambda done: self._calls.pop(message.call, None))
            case messages.AwaitPage() | messages.GetPages():
                self.connection.close("pages are wanted, but the layouts differ")
            case messages.Done():
                self._done(message.call)

    def lost(self, why: str) -> None:
        self._server.leave(self)
        for task in tuple(self._calls.values()):
            task.cancel()

    def _send(self, message: messages.FromServer) -> None:
        self.connection.send(encode(message))

    def _greet(self, message: messages.CompareLayouts) -> None:
        server = self._server
        self._equal = message.digest == server.layout.digest
        direct = None if server.direct is None else server.direct.address
        self._send(messages.LayoutReply(server.layout, self._equal, server.shards, direct))

    def _done(self, call: int) -> None:
        taken = self._taken.get(call)
        if taken is not None:
            taken.set()
        elif call in self._calls:
            self._calls[call].cancel()

    async def _answer(self, message: messages.AwaitPage | messages.GetPages) -> None:
        giving = isinstance(message, messages.GetPages)
        try:
            if isinstance(message, messages.GetPages):
                await self._give(message)
            else:
                there = await self._server.source.arrive(message.digest, min(message.seconds, WAIT))
                self._send(messages.PageStatus(message.call, there))
        except Exception:
            log.exception("giving KV pages failed")
            self._send(messages.PagesHeader(message.call, 0) if giving else messages.PageStatus(message.call, False))

    async def _give(self, want: messages.GetPages) -> None:
        server = self._server
        async with server.copies:
            direct = server.direct if want.direct else None
            export = await server.source.export(want.digests, server.most, direct is not None)
            if export is None:
                self._send(messages.PagesHeader(want.call, 0))
                return
            server.pages += export.pages
            if direct is None:
                await self._send_pages(want, export)
            else:
                await self._offer(want, export, direct)

    async def _send_pages(self, want: messages.GetPages, export: Export) -> None:
        arrays, sums = await asyncio.to_thread(_packed, export)
        self._send(messages.PagesHeader(want.call, export.pages, tuple(map(len, arrays)), sums))
        for array in arrays:
            for at in range(0, len(array), PART_BYTES):
                self._send(messages.PagesPart(want.call, array[at : at + PART_BYTES].tobytes()))
                await self.connection.drained()

    async def _offer(self, want: messages.GetPages, export: Export, direct: Direct) -> None:
        """Offer a piece, and keep it until it has been pulled: jax does not keep deleted arrays."""
        sums = await asyncio.to_thread(lambda: [int(x) for checksum in export.sums for x in np.asarray(checksum)])
        taken = self._taken[want.call] = asyncio.Event()
        try:
            number = direct.offer(export.piece, OFFERED)
            self._send(messages.Offer(want.call, export.pages, export.piece[0].shape[2], number, tuple(sums)))
            async with asyncio.timeout(OFFERED):
                await taken.wait()
        except TimeoutError:
            log.warning("an offer of %d KV pages was not pulled within %g s", export.pages, OFFERED)
        finally:
            del self._taken[want.call]


def _packed(export: Export) -> tuple[list[Bytes], tuple[int, ...]]:
    """Return the bytes of the pages of each array, without the padding of the piece, and their CRC-32."""
    arrays = [np.ascontiguousarray(np.asarray(array)[:, :, : export.pages]) for array in export.piece]
    flat = [array.reshape(-1).view(np.uint8) for array in arrays]
    return flat, tuple(zlib.crc32(array.data) for array in flat)
