"""What a request occupies on an instance: its pages and its slot. Writer: the Scheduler of the instance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..api.log import Log, no_log
from ..api.request import Request
from .block_pool import BlockPool, chain


class Reservation(NamedTuple):
    """Pages and a slot set aside for a request whose KV is on its way. The first `cached` pages are here already."""

    request: int
    pages: tuple[int, ...]
    cached: int
    slot: int


class WriteBack(NamedTuple):
    """Pages set aside for KV that comes back to where its prompt was computed. The first `cached` are here already."""

    pages: tuple[int, ...]
    cached: int
    digests: tuple[bytes, ...]


class KVManager:
    """Pages and slots of one instance.

    A request is admitted with the pages of all its known tokens or not at all. So a prefill, once begun, never
    waits for pages, and what is on its way to another instance always arrives: that is why pools of a few pages
    cannot deadlock. Only decoding rows grow.
    """

    def __init__(self, blocks: BlockPool, slots: int, log: Log = no_log) -> None:
        self.blocks = blocks
        self._log = log
        self._slots = list(range(slots - 1, -1, -1))
        self._returning: dict[int, WriteBack] = {}  # by request

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def digests(self, request: Request, tokens: int) -> Sequence[bytes]:
        """Digests of the full pages of the first `tokens` tokens; kept on the request, computed once."""
        size, known = self.blocks.page_size, request.digests
        for page in range(len(known), tokens // size):
            parent = known[-1] if known else request.salt
            known.append(chain(parent, request.tokens(page * size, (page + 1) * size)))
            self._log("digest", id=request.id, digest=known[-1])
        return known[: tokens // size]

    def sought(self, request: Request) -> Sequence[bytes]:
        """Digests of the leading pages that it may find here. At least one token is always left to compute."""
        if not self.blocks.prefix_caching or request.params.prompt_logprobs is not None:
            return ()
        return self.digests(request, request.known - max(1, request.pending))

    def cached(self, request: Request) -> list[bytes]:
        """Those of them that are here."""
        digests = self.sought(request)
        return list(digests[: self.blocks.match(digests)])

    def admit(self, request: Request, reserve: int) -> bool:
        """Give pages for every known token, and a slot; `reserve` pages must stay available for those that grow."""
        if not self._slots:
            return False
        hits = self.cached(request)
        pages = self.blocks.take(hits, self.blocks.count(request.known) - len(hits), reserve)
        if pages is None:
            return False
        request.pages = pages
        request.slot = self._slots.pop()
        request.computed = len(hits) * self.blocks.page_size
        if request.scheduled_at is None:
            request.cached = request.computed
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Pages so that `tokens` tokens fit."""
        fresh = self.blocks.count(tokens) - len(request.pages)
        if fresh > 0:
            more = self.blocks.take((), fresh)
            if more is None:
                return False
            request.pages += more
        return True

    def vacate(self, request: Request) -> None:
        """Take everything back; the content of full pages stays findable until it is evicted."""
        self.blocks.release(request.pages)
        request.pages = []
        request.computed = 0
        request.sent_pages = 0
        request.on_device = False
        if request.slot is not None:
            self._slots.append(request.slot)
            request.slot = None

    def register(self, request: Request, start: int, end: int) -> None:
        """Tokens [start, end) are in the cache now, all known on the host: name the pages that they filled."""
        size = self.blocks.page_size
        if self.blocks.prefix_caching and end // size > start // size:
            digests = self.digests(request, end)
            for page in range(start // size, end // size):
                self.blocks.register(request.pages[page], digests[page], digests[page - 1] if page else b"")

    def condemn(self, request: Request) -> set[int]:
        """What this request computed was not finite and must not be found by others. Returns its own pages."""
        own = request.pages[request.cached // self.blocks.page_size :]
        for page in own:
            self.blocks.unregister(page)
        return set(own)

    def reserve(self, request: Request, reserve: int) -> Reservation | None:
        """Set as many pages as it holds elsewhere, and a slot, aside for a request that another instance owns."""
        if not self._slots:
            return None
        hits = self.cached(request)
        pages = self.blocks.take(hits, len(request.pages) - len(hits), reserve)
        if pages is None:
            return None
        return Reservation(request.id, tuple(pages), len(hits), self._slots.pop())

    def release(self, reservation: Reservation) -> None:
        self.blocks.release(reservation.pages)
        self._slots.append(reservation.slot)

    def occupy(self, request: Request, reservation: Reservation) -> None:
        """The KV has arrived: the request lives here from now on."""
        request.pages = list(reservation.pages)
        request.slot = reservation.slot
        request.sent_pages = 0
        request.on_device = False
        self.register(request, 0, request.computed)

    def reserve_write_back(self, id: int, digests: Sequence[bytes], reserve: int) -> WriteBack | None:
        """Set pages aside for a prefix that a request which is over has elsewhere, where `reserve` pages are left."""
        self._log("reserve_write_back", id=id, digests=[digest.hex() for digest in digests])
        hits = self.blocks.match(digests)
        if hits == len(digests) or id in self._returning:
            return None
        pages = self.blocks.take(digests[:hits], len(digests) - hits, reserve)
        if pages is None:
            return None
        self._returning[id] = WriteBack(tuple(pages), hits, tuple(digests))
        return self._returning[id]

    def finish_write_back(self, id: int, arrived: bool) -> None:
        """Let the pages go; where their KV has arrived, findable until they are wanted."""
        self._log("finish_write_back", id=id, arrived=arrived)
        returned = self._returning.pop(id, None)
        if returned is None:
            return  # the pool is new since
        if arrived:
            parents = (b"", *returned.digests)
            for page, digest, parent in zip(returned.pages, returned.digests, parents, strict=False):
                self.blocks.register(page, digest, parent)
        self.blocks.release(returned.pages)

    def check(self, requests: Iterable[Request], reservations: Iterable[Reservation], slots: int) -> None:
        """Conservation of pages and slots. Raises AssertionError."""
        residents, expected = list(requests), list(reservations)
        owners: list[Sequence[int]] = [request.pages for request in residents]
        owners += [reservation.pages for reservation in expected]
        owners += [returned.pages for returned in self._returning.values()]
        self.blocks.check(owners)
        taken = [r.slot for r in residents if r.slot is not None] + [r.slot for r in expected]
        assert sorted(self._slots + taken) == list(range(slots)), "a slot is lost or given twice"
