"""What prefix caches gain and lose, published by ZeroMQ in vLLM's format for routers such as llm-d's.

A batch is three frames: topic, sequence number (8 bytes, big-endian) and msgpack of `[time, events, rank]`.
Events have the tokens of pages, which the caches do not know: they are taken from the requests that filled them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxserve.errors import InvalidValue
from jaxserve.install import needs
from jaxserve.sched.api.request import Request
from jaxserve.sched.instance.block_pool import BlockPool, CacheEvents
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.settings.kv_events import NAME, KVEvents

log = logging.getLogger(__name__)

PERIOD = 0.05  # seconds between two batches
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number after a replay
MEDIUM = "GPU"  # vLLM's word for the memory of the devices


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Base of events."""


class BlockStored(_Event, tag="BlockStored"):
    """Pages that follow each other have entered a prefix cache."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(_Event, tag="BlockRemoved"):
    """Pages have left a prefix cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, tag="AllBlocksCleared"):
    """A prefix cache is empty."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of an instance since the batch before."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class Page(NamedTuple):
    """The content of a page."""

    parent: bytes | None
    tokens: tuple[int, ...]


def number(digest: bytes) -> int:
    """Return the hash by which events name a page: 64 bits of its digest."""
    return int.from_bytes(digest[:8], "big")


class Contents:
    """The tokens of pages, by digest. Writer: the engine's thread."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: dict[bytes, Page] = {}
        self._read: dict[int, int] = {}  # request -> pages that were read

    def read(self, request: Request) -> None:
        """Read the pages whose digests a request has got since the last call."""
        digests, size = request.digests, self._page_size
        for at in range(self._read.get(request.id, 0), len(digests)):
            tokens = request.tokens(at * size, (at + 1) * size)
            self._pages[digests[at]] = Page(digests[at - 1] if at else None, tokens)
        self._read[request.id] = len(digests)

    def forget(self, request: Request) -> None:
        """Forget what was read of a request that has ended."""
        self._read.pop(request.id, None)

    def keep(self, digests: Iterable[bytes]) -> None:
        """Forget all pages but those with these digests."""
        self._pages = {digest: self._pages[digest] for digest in digests if digest in self._pages}

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, digest: bytes) -> Page | None:
        return self._pages.get(digest)


class Follower:
    """The events of one instance's prefix cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._blocks: BlockPool = scheduler.blocks
        self._events: CacheEvents = self._blocks.follow()
        self._told: set[bytes] = set()  # pages that subscribers know of

    def take(self, contents: Contents) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Return the events since the last call."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if self._scheduler.blocks is not self._blocks:  # the pool was rebuilt after a failed step
            self._blocks = self._scheduler.blocks
            self._events = self._blocks.follow()
            self._told.clear()
            events.append(AllBlocksCleared())
        gained, lost = self._events.take()
        removed = [digest for digest in lost if digest in self._told]  # others came and went since the last call
        if removed and not self._blocks.digests:
            self._told.clear()
            return [AllBlocksCleared()]
        if removed:
            self._told.difference_update(removed)
            events.append(BlockRemoved([number(digest) for digest in removed], MEDIUM))
        events += self._stored(gained, contents)
        return events

    def _stored(self, gained: Sequence[bytes], contents: Contents) -> list[BlockStored]:
        """Return one event for each run of pages that follow each other."""
        events: list[BlockStored] = []
        last: bytes | None = None
        for digest in gained:
            page = contents.get(digest)
            if page is None or digest in self._told:
                continue  # without its tokens, for example after a restart with KV on disk, routers expect fewer hits
            if last is None or page.parent != last:
                parent = None if page.parent is None else number(page.parent)
                events.append(BlockStored([], parent, [], self._blocks.page_size, None, MEDIUM))
            events[-1].block_hashes.append(number(digest))
            events[-1].token_ids.extend(page.tokens)
            self._told.add(digest)
            last = digest
        return events


class Publisher:
    """The sockets of one instance. Writer: the engine's thread."""

    def __init__(self, settings: KVEvents, rank: int) -> None:
        """Bind the sockets, or connect those of a named host as vLLM does. Raises InvalidValue."""
        zmq: Any = importlib.import_module("zmq")
        self._rank = rank
        self._topic = settings.topic.encode()
        self._next = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._context = zmq.Context.instance()
        self._replay: Any = None
        endpoint, replay = settings.of(rank)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(settings.hwm)
        self._socket.linger = 0
        try:
            binds = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
            (self._socket.bind if binds else self._socket.connect)(endpoint)
            if replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.linger = 0
                self._replay.bind(replay)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidValue(f"{NAME}: {endpoint} or {replay} cannot be used: {error}", NAME) from error

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """Where subscribers connect, with the ports that the system chose for *."""
        replay = None if self._replay is None else self._replay.last_endpoint.decode()
        return self._socket.last_endpoint.decode(), replay

    def send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Send a batch, without waiting for subscribers."""
        content = msgspec.msgpack.encode(Batch(time.time(), events, self._rank))
        self._socket.send_multipart((self._topic, self._next.to_bytes(8, "big"), content))
        self._sent.append((self._next, content))
        self._next += 1

    def answer(self) -> None:
        """Send again what was asked for: all batches from a sequence number on, and END."""
        zmq: Any = importlib.import_module("zmq")
        while self._replay is not None:
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("ignoring a request for KV events of %d frames: 8 bytes are wanted", len(frames))
                continue
            client, empty, first = frames[0], frames[1], int.from_bytes(frames[2], "big")
            for number_, content in self._sent:
                if number_ >= first:
                    self._replay.send_multipart((client, empty, number_.to_bytes(8, "big"), content))
            self._replay.send_multipart((client, empty, END, b""))

    def close(self) -> None:
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close()


class KVEventFeed:
    """The events of all instances of an engine. Everything here runs on the engine's thread."""

    def __init__(self, settings: KVEvents, schedulers: Sequence[Scheduler]) -> None:
        """Open the sockets of all instances. Raises InvalidValue."""
        check_events(settings)
        self._schedulers = schedulers
        self._contents = Contents(schedulers[0].limits.page_size)
        self._followers = [Follower(scheduler) for scheduler in schedulers]
        self.publishers = [Publisher(settings, settings.first_rank + at) for at in range(len(schedulers))]

    def ended(self, request: Request) -> None:
        """Read the last pages of a request that ends."""
        self._contents.read(request)
        self._contents.forget(request)

    def publish(self) -> None:
        """Send what has changed since the last call, and answer requests for earlier batches."""
        for scheduler in self._schedulers:
            for request in scheduler:
                self._contents.read(request)
        for follower, publisher in zip(self._followers, self.publishers, strict=True):
            if events := follower.take(self._contents):
                publisher.send(events)
            publisher.answer()
        pools = [scheduler.blocks for scheduler in self._schedulers]
        if len(self._contents) > 2 * sum(pool.pages for pool in pools):
            live = (digest for scheduler in self._schedulers for request in scheduler for digest in request.digests)
            self._contents.keep({*live, *(digest for pool in pools for digest in pool.digests)})

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def check_events(settings: KVEvents) -> None:
    """Raise InvalidValue if events are wanted and ZeroMQ is missing."""
    if settings.published and importlib.util.find_spec("zmq") is None:
        raise InvalidValue(f"{NAME} needs ZeroMQ: {needs('events')}", NAME)
