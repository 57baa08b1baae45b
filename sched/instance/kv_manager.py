"""The pages and slots of requests on one instance. Writer: the Scheduler of the instance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..api.log import Log, no_log
from ..api.request import Request
from .block_pool import BlockPool, next_digest
from .session_pins import SessionPins


class Reservation(NamedTuple):
    """Pages and a slot for a request whose KV is being transferred here.

    The first `cached` pages are in the prefix cache of this instance already.
    """

    request: int
    pages: tuple[int, ...]
    cached: int
    slot: int


class WriteBack(NamedTuple):
    """Pages for KV that is written back to the instance that computed the prompt.

    The first `cached` pages are in the prefix cache of this instance already.
    """

    pages: tuple[int, ...]
    cached: int
    digests: tuple[bytes, ...]


class KVManager:
    """The allocator of pages and slots to requests.

    A request is admitted only with the pages of all its known tokens. Therefore a prefill that has
    begun never waits for pages, and KV that is being transferred always arrives, so that even pools
    of a few pages cannot deadlock. Only running decodes grow.
    """

    def __init__(
        self, blocks: BlockPool, slots: int, log: Log = no_log, share: float = 0.0, timeout: float = 0.0
    ) -> None:
        """`share` and `timeout`: bounds of the pages that sessions pin, as SessionPins takes them."""
        self.blocks = blocks
        self.pins = SessionPins(blocks, share, timeout)
        self._log = log
        self._slots = list(range(slots - 1, -1, -1))
        self._returning: dict[int, WriteBack] = {}  # by request id

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def digests(self, request: Request, tokens: int) -> Sequence[bytes]:
        """Return the digests of the full pages of the first `tokens` tokens, cached on the request."""
        size, known = self.blocks.page_size, request.digests
        for _ in range(len(known), tokens // size):
            self._log("digest", id=request.id, digest=next_digest(request, size))
        return known[: tokens // size]

    def sought(self, request: Request) -> Sequence[bytes]:
        """Return the digests of the leading pages to look up for a request.

        At least one token is left to compute, since its logits are needed.
        """
        if not self.blocks.prefix_caching or request.params.whole_prompt:
            return ()
        return self.digests(request, request.known - max(1, request.pending))

    def cached(self, request: Request) -> list[bytes]:
        """Return the digests of the leading pages that are in the prefix cache."""
        digests = self.sought(request)
        return list(digests[: self.blocks.match(digests)])

    def admit(self, request: Request, reserve: int) -> bool:
        """Allocate pages for every known token, and a slot. Returns False if there is no room.

        `reserve` pages must remain available, for running decodes to grow.
        """
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
        """Allocate pages until `tokens` tokens fit. Returns False if there are too few."""
        fresh = self.blocks.count(tokens) - len(request.pages)
        if fresh > 0:
            more = self.blocks.take((), fresh)
            if more is None:
                return False
            request.pages += more
        return True

    def vacate(self, request: Request) -> None:
        """Release the pages and the slot. Full pages stay in the prefix cache until evicted."""
        self.blocks.release(request.pages)
        request.pages = []
        request.computed = 0
        request.sent_pages = 0
        request.on_device = False
        if request.slot is not None:
            self._slots.append(request.slot)
            request.slot = None

    def pin(self, request: Request) -> None:
        """Keep the cached pages of a request in the cache for the next turn of its session, if it has one."""
        if request.asked.session and request.last_token_at is not None and self.blocks.prefix_caching:
            digests = self.digests(request, request.prompt_length + len(request.output))
            self.pins.pin(request.asked.session, digests[: self.blocks.match(digests)], request.last_token_at)

    def forget_cached(self) -> None:
        """Clear the cached prefixes that no request holds, and all pins."""
        self.pins.clear()
        self.blocks.forget_idle()

    def register(self, request: Request, start: int, end: int) -> None:
        """Add the pages filled by tokens [start, end) to the prefix cache.

        Their KV is computed and the tokens are known on the host.
        """
        size = self.blocks.page_size
        if self.blocks.prefix_caching and end // size > start // size:
            digests = self.digests(request, end)
            for page in range(start // size, end // size):
                self.blocks.register(request.pages[page], digests[page], digests[page - 1] if page else b"")

    def condemn(self, request: Request) -> set[int]:
        """Remove the pages that a request computed from the prefix cache, because their KV is not finite.

        Returns these pages.
        """
        own = request.pages[request.cached // self.blocks.page_size :]
        for page in own:
            self.blocks.unregister(page)
        return set(own)

    def reserve(self, request: Request, reserve: int) -> Reservation | None:
        """Reserve a slot, and as many pages as the request holds on its own instance."""
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
        """Give reserved pages and the slot to a request whose KV has arrived."""
        request.pages = list(reservation.pages)
        request.slot = reservation.slot
        request.sent_pages = 0
        request.on_device = False
        self.register(request, 0, request.computed)

    def reserve_write_back(self, id: int, digests: Sequence[bytes], reserve: int) -> WriteBack | None:
        """Reserve pages for a prefix of a finished request on another instance.

        Returns None if fewer than `reserve` pages would remain available, or nothing has to be
        copied.
        """
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
        """Release the pages of a write-back. They stay in the prefix cache if their KV arrived."""
        self._log("finish_write_back", id=id, arrived=arrived)
        returned = self._returning.pop(id, None)
        if returned is None:
            return  # the pool was rebuilt since
        if arrived:
            parents = (b"", *returned.digests)
            for page, digest, parent in zip(returned.pages, returned.digests, parents, strict=False):
                self.blocks.register(page, digest, parent)
        self.blocks.release(returned.pages)

    def check(self, requests: Iterable[Request], reservations: Iterable[Reservation], slots: int) -> None:
        """Assert that no page or slot is lost or allocated twice."""
        residents, expected = list(requests), list(reservations)
        owners: list[Sequence[int]] = [request.pages for request in residents]
        owners += [reservation.pages for reservation in expected]
        owners += [returned.pages for returned in self._returning.values()]
        self.blocks.check(owners)
        self.pins.check()
        taken = [r.slot for r in residents if r.slot is not None] + [r.slot for r in expected]
        assert sorted(self._slots + taken) == list(range(slots)), "a slot is lost or allocated twice"
