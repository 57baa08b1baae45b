"""A KV tier: pages that are kept in host memory or on disk, as a source of prefix fetches.

The same code serves and simulates. What differs is the medium, which keeps the bytes, and the
codec, which cuts buffers of an executor into pages and joins them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from ..api.kv_source import PageCopy
from ..api.plan import KVBuffer
from ..api.request import Request
from .page_index import PageIndex

AT_ONCE = 64  # pages per fetch: the first ones are copied to the device while more are read
LEARNING = 0.1  # weight of the last fetch in the predicted seconds per page

Page = Any  # the KV of one page, opaque outside of the media


class Codec(Protocol):
    """The conversion between buffers of an executor and pages."""

    @property
    def grain(self) -> int: ...
    async def split(self, kv_buffers: Sequence[KVBuffer]) -> Sequence[Page]: ...
    async def join(self, pages: Sequence[Page]) -> KVBuffer: ...


class Stored(NamedTuple):
    """A page on its way into a tier."""

    copy: PageCopy
    page: Page
    uses: int = 1


class Medium(Protocol):
    """Where the bytes of pages are kept. No call raises: what fails is missing."""

    async def write(self, several: Sequence[Stored]) -> Sequence[bytes]:
        """Keep pages, and return the digests of those that were written."""

    async def read(self, digests: Sequence[bytes]) -> Sequence[Page | None]:
        """Return pages; None for one that is missing or damaged."""

    def take(self, digest: bytes) -> Page | None:
        """Forget a page. Returns it if that costs no time."""


@dataclass
class TierStats:
    """Totals of a tier."""

    hits: int = 0  # pages fetched
    stores: int = 0  # pages written
    skipped: int = 0  # pages that found no room, or were not written
    missing: int = 0  # pages that were to be there, but were missing or damaged
    seconds: float = 0.0  # of fetches
    fetches: int = 0


class KVTier:
    """A KVSource and KVStore. Writer of its PageIndex and medium, in the event loop of the Cluster.

    Pages that it evicts go to the tier below, if there is one.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        page_bytes: int,
        medium: Medium,
        codec: Codec,
        clock: Callable[[], float],
        *,
        seconds: float,
        below: KVTier | None = None,
    ) -> None:
        """capacity: in pages. seconds: expected for the fetch of a page, until fetches have been measured."""
        self.name = name
        self.page_bytes = page_bytes
        self.index = PageIndex(capacity)
        self.stats = TierStats()
        self.below = below
        self._medium = medium
        self._codec = codec
        self._clock = clock
        self._each = seconds

    @property
    def grain(self) -> int:
        return self._codec.grain

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.index

    def find(self, request: Request, digests: Sequence[bytes]) -> int:
        return self.index.match(digests)

    def seconds(self, pages: int) -> float:
        return pages * self._each

    async def fetch(self, request: Request, digests: Sequence[bytes], start: int) -> KVBuffer | None:
        wanted, began = digests[start : start + AT_ONCE], self._clock()
        wanted = wanted[: self.index.match(wanted)]
        self.index.use(wanted)
        pages = await self._medium.read(wanted)
        readable = next((count for count, page in enumerate(pages) if page is None), len(pages))
        if readable < len(wanted):
            self.stats.missing += 1
            self._drop(wanted[readable])
        if not readable:
            return None
        kv_buffer = await self._codec.join(pages[:readable])
        took = self._clock() - began
        self._each += LEARNING * (took / readable - self._each)
        self.stats.hits += readable
        self.stats.fetches += 1
        self.stats.seconds += took
        return kv_buffer

    async def store(self, copies: Sequence[PageCopy], kv_buffers: Sequence[KVBuffer]) -> None:
        pages = await self._codec.split(kv_buffers)
        await self._put([Stored(copy, page) for copy, page in zip(copies, pages, strict=True)])

    async def _put(self, several: Sequence[Stored]) -> None:
        """Write pages that are not here, and pass on those that are evicted for them or find no room."""
        mine: list[Stored] = []
        evicted: list[Stored] = []
        homeless: list[Stored] = []
        for stored in several:
            copy = stored.copy
            if copy.digest in self.index:
                continue
            while not self.index.add(copy.digest, copy.parent, copy.cost, stored.uses):
                least = self.index.evict(copy.parent)
                if least is None:
                    homeless.append(stored)
                    break
                digest, entry = least
                evicted.append(
                    Stored(PageCopy(digest, entry.parent, entry.cost), self._medium.take(digest), entry.uses)
                )
            else:
                mine.append(stored)
        written = set(await self._medium.write(mine))
        for digest in (page.copy.digest for page in mine):
            if digest in written and digest in self.index:
                self.index.written(digest)
            else:
                self._drop(digest)
        self.stats.stores += len(written)
        self.stats.skipped += len(mine) - len(written)
        if self.below is None:
            self.stats.skipped += len(homeless)
        elif evicted or homeless:
            await self.below._put([*evicted[::-1], *homeless])  # the end of a prefix is evicted first

    async def flush(self, seconds: float) -> int:
        """Copy pages to the tier below for up to `seconds`, the most valuable first. Returns the number written.

        For the end of a process whose tier below outlives it. Nothing else may use the tiers meanwhile.
        """
        below, end = self.below, self._clock() + seconds
        if below is None:
            return 0
        before = below.stats.stores
        ranked = iter(list(self.index.ranked()))
        while self._clock() < end and (several := list(islice(ranked, AT_ONCE))):
            new = [(digest, entry) for digest, entry in several if digest not in below]
            pages = await self._medium.read([digest for digest, _ in new])
            await below._put(
                [
                    Stored(PageCopy(digest, entry.parent, entry.cost), page, entry.uses)
                    for (digest, entry), page in zip(new, pages, strict=True)
                    if page is not None
                ]
            )
        return below.stats.stores - before

    def _drop(self, digest: bytes) -> None:
        self.index.discard(digest)
        self._medium.take(digest)

    def admit(self, copy: PageCopy) -> bool:
        """Take in a page that the medium has already. Returns False if there is no room."""
        added = self.index.add(*copy)
        if added:
            self.index.written(copy.digest)
        return added

    def clear(self) -> None:
        for digest in self.index.clear():
            self._medium.take(digest)
        if self.below is not None:
            self.below.clear()
