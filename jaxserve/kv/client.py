"""The end that takes KV pages from another engine process, and checks that they are what was given."""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxserve.engine.memory.transfer import KVBuffer, Piece
from jaxserve.engine.programs.checksum import checksums
from jaxserve.kv import messages
from jaxserve.kv.direct import Direct
from jaxserve.kv.layout import Layout
from jaxserve.kv.share import Transport
from jaxserve.sched.api.errors import InvalidValue, JaxserveError, Unavailable
from jaxserve.wire.address import Address
from jaxserve.wire.connection import Connection, encode

log = logging.getLogger(__name__)

GREETING = 10.0  # seconds until the other process must have sent its layout
SILENT = 10.0  # seconds without a byte of an answer, beyond the wait that was asked for
PULL = 20.0  # seconds for a pull between devices


class WrongKV(JaxserveError):
    """KV that is not what the other process gave."""


class Destination(NamedTuple):
    """Where pieces of KV arrive: like `arrays`, which are one piece, with another number of pages."""

    layout: Layout
    shards: str
    arrays: Piece
    sizes: tuple[int, ...]  # pages that a piece may have

    def size(self, pages: int) -> int:
        """Return the size of the smallest piece for so many pages. Raises WrongKV if there is none."""
        fits = [size for size in self.sizes if size >= pages]
        if not fits:
            raise WrongKV(f"{pages} pages came, and a piece has at most {self.sizes[-1]}")
        return fits[0]

    def shapes(self, size: int) -> list[Any]:
        return [
            jax.ShapeDtypeStruct((*array.shape[:2], size, *array.shape[3:]), array.dtype, sharding=array.sharding)
            for array in self.arrays
        ]


class _Answer:
    """An answer that is arriving. Writer: its KVClient."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()  # set with every message
        self.complete = False
        self.what: messages.PageStatus | messages.PagesHeader | messages.Offer | None = None
        self.content: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.filled = 0  # bytes


class KVClient:
    """A connection to a KVServer of another process. Everything here runs on one loop."""

    def __init__(self, destination: Destination, direct: Direct | None, transport: Transport) -> None:
        """Use `connect` instead."""
        self.direct = False  # whether pages come from device to device
        self.gone: str | None = None  # why the connection is lost
        self._destination, self._puller, self._transport = destination, direct, transport
        self._from = ""  # address for pulls
        self._calls = itertools.count()
        self._answers: dict[int, _Answer] = {}
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection: Connection

    @classmethod
    async def connect(
        cls, address: Address, key: bytes, destination: Destination, direct: Direct | None, transport: Transport
    ) -> KVClient:
        """Connect, and compare layouts. Raises InvalidValue that names the first difference."""
        client = cls(destination, direct, transport)

        def connection() -> Connection:
            client._connection = Connection(
                key,
                "front",
                opened=lambda _: client._send(messages.CompareLayouts(destination.layout.digest)),
                received=client._received,
                lost=client._lost,
            )
            return client._connection

        await address.connect(connection)
        try:
            async with asyncio.timeout(GREETING):
                await client._greeted
        except TimeoutError:
            client.close()
            raise InvalidValue(f"no KV layout came from {address} within {GREETING:g} s", "address") from None
        except JaxserveError as error:
            client.close()
            raise InvalidValue(f"KV pages of {address} cannot be used: {error}", "address") from None
        except asyncio.CancelledError:
            client.close()
            raise
        return client

    def close(self) -> None:
        self._connection.close()

    async def there(self, digest: bytes, seconds: float) -> bool:
        """Wait until a page is there, and return whether it is within `seconds`. Raises Unavailable as `pages`."""
        with self._asking() as (call, answer):
            self._send(messages.AwaitPage(call, digest, seconds))
            await self._arrival(answer, seconds)
            return isinstance(answer.what, messages.PageStatus) and answer.what.there

    async def pages(self, digests: Sequence[bytes]) -> KVBuffer | None:
        """Return the first of these pages, as many as come in one answer; None if the first is not there.

        Raises WrongKV if the content is not what was given, and Unavailable if the other process is lost or silent.
        """
        with self._asking() as (call, answer):
            self._send(messages.GetPages(call, tuple(digests), self.direct))
            await self._arrival(answer)
            match answer.what:
                case messages.Offer() as offer:
                    return await self._pulled(offer)
                case messages.PagesHeader() as header if header.pages:
                    return await asyncio.to_thread(_unpacked, header, answer.content, self._destination)
            return None

    @contextmanager
    def _asking(self) -> Iterator[tuple[int, _Answer]]:
        """Number a call, and tell the other process once it is over."""
        call, answer = next(self._calls), _Answer()
        self._answers[call] = answer
        try:
            yield call, answer
        finally:
            del self._answers[call]
            self._send(messages.Done(call))

    async def _arrival(self, answer: _Answer, seconds: float = 0.0) -> None:
        while not answer.complete:
            if self.gone is not None:
                raise Unavailable(f"the process that gives KV pages has ended: {self.gone}")
            answer.heard.clear()
            try:
                async with asyncio.timeout(SILENT + (seconds if answer.what is None else 0.0)):
                    await answer.heard.wait()
            except TimeoutError:
                raise Unavailable(f"no KV came for {SILENT:g} s") from None

    async def _pulled(self, offer: messages.Offer) -> KVBuffer:
        assert self._puller is not None
        shapes = self._destination.shapes(self._destination.size(offer.size))
        try:
            piece = await asyncio.to_thread(self._puller.pull, self._from, offer.uuid, shapes, PULL)
        except RuntimeError as error:
            raise Unavailable(f"a pull of KV pages failed: {error}") from error
        sums = await asyncio.to_thread(lambda: [int(x) for checksum in checksums(piece) for x in np.asarray(checksum)])
        if tuple(sums) != offer.sums or not 0 < offer.pages <= offer.size:
            raise WrongKV(f"{offer.pages} pulled KV pages have checksums {sums}, and were given as {list(offer.sums)}")
        return KVBuffer(offer.pages, ((offer.pages, piece),))

    # messages

    def _send(self, message: messages.FromClient) -> None:
        self._connection.send(encode(message))

    def _received(self, frame: bytes) -> None:
        try:
            message = messages.decode_from_server(frame)
        except ValueError as error:
            self._connection.close(f"a message that cannot be decoded: {error}")
            return
        if isinstance(message, messages.LayoutReply):
            self._greet(message)
            return
        answer = self._answers.get(message.call)
        if answer is None:
            return  # no longer wanted
        match message:
            case messages.PagesHeader():
                answer.what, answer.content = message, np.empty(min(sum(message.sizes), self._most()), np.uint8)
                answer.complete = not len(answer.content)
            case messages.PageStatus() | messages.Offer():
                answer.what, answer.complete = message, True
            case messages.PagesPart():
                part = np.frombuffer(message.content, np.uint8)[: len(answer.content) - answer.filled]
                answer.content[answer.filled : answer.filled + len(part)] = part
                answer.filled += len(part)
                answer.complete = answer.filled == len(answer.content)
        answer.heard.set()

    def _most(self) -> int:
        """Return the bytes of the largest piece."""
        return sum(
            prod(shape.shape) * shape.dtype.itemsize for shape in self._destination.shapes(self._destination.sizes[-1])
        )

    def _greet(self, message: messages.LayoutReply) -> None:
        if self._greeted.done():
            return
        why = self._destination.layout.difference(message.layout)
        apart = self._apart(message)
        if why is None and self._transport == "direct" and apart is not None:
            why = f"kv_transfer='direct' is not possible: {apart}"
        if why is not None or not message.equal:
            self._greeted.set_exception(InvalidValue(why or "its layout has another digest", "kv_transfer"))
            return
        self.direct = self._transport != "host" and apart is None
        self._from = message.direct or ""
        self._greeted.set_result(None)

    def _apart(self, message: messages.LayoutReply) -> str | None:
        """Return why pages cannot come from device to device; None if they can."""
        if message.direct is None or self._puller is None:
            return f"jax's transfer server does not run {'there' if message.direct is None else 'here'}"
        if message.shards != self._destination.shards:
            return f"shards are {message.shards} there and {self._destination.shards} here"
        return None

    def _lost(self, why: str) -> None:
        self.gone = why
        if not self._greeted.done():
            self._greeted.set_exception(Unavailable(why))
        for answer in self._answers.values():
            answer.heard.set()


def _unpacked(header: messages.PagesHeader, content: npt.NDArray[np.uint8], destination: Destination) -> KVBuffer:
    """Return the piece of an answer on the devices. Raises WrongKV if a length or a checksum is wrong."""
    size, at, piece = destination.size(header.pages), 0, []
    shapes = destination.shapes(size)
    lengths = [prod(shape.shape) // size * header.pages * shape.dtype.itemsize for shape in shapes]
    if list(header.sizes) != lengths:
        raise WrongKV(f"{header.pages} KV pages have {list(header.sizes)} bytes, and {lengths} were expected")
    for target, length, given in zip(shapes, lengths, header.sums, strict=True):
        mine = content[at : at + length]
        at += length
        checksum = zlib.crc32(mine.data)
        if checksum != given:
            raise WrongKV(f"{header.pages} KV pages have CRC-32 {checksum:#x}, and were given with {given:#x}")
        array = np.zeros(target.shape, target.dtype)
        array[:, :, : header.pages] = mine.view(target.dtype).reshape(
            *target.shape[:2], header.pages, *target.shape[3:]
        )
        piece.append(jax.device_put(array, target.sharding))
    jax.block_until_ready(piece)
    return KVBuffer(header.pages, ((header.pages, tuple(piece)),))
