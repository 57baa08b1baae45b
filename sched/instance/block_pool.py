"""The pages of an instance's KV pool. Each is in one state: free, idle (cached and evictable) or held.

Prefixes are shared by a cryptographic digest of the whole prefix, chained page by page. A collision
would show one user another's context, which rules out Python's `hash`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

from ..api.errors import InvalidValue
from ..api.request import Request

DIGEST_SIZE = 16


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a page of tokens that follows the prefix with digest `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST_SIZE).digest()


def next_digest(request: Request, page_size: int) -> bytes:
    """Add the digest of the next full page of known tokens to `request.digests`, and return it."""
    known = request.digests
    start = len(known) * page_size
    known.append(chain(known[-1] if known else request.asked.salt, request.tokens(start, start + page_size)))
    return known[-1]


class CacheEvents:
    """The prefixes that a cache gained or lost, for one reader. Writer: the BlockPool that it follows."""

    def __init__(self, pages: Mapping[bytes, int]) -> None:
        """`pages`: the digests that the pool knows; those of now count as gained."""
        self._pages = pages
        self._changed = dict.fromkeys(pages)

    def note(self, digest: bytes) -> None:
        """Note that a prefix was added or removed."""
        self._changed[digest] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the digests gained and lost since the last call."""
        changed, self._changed = self._changed, {}
        gained = [digest for digest in changed if digest in self._pages]
        return gained, [digest for digest in changed if digest not in self._pages] if len(gained) < len(changed) else []


class BlockPool:
    """The allocator of KV pages, with a prefix cache. Writer: the Scheduler of the instance.

    Held pages are reference counted, since requests may share a prefix. When its last holder
    releases a page, it becomes idle if its content has a digest, and free otherwise. The least
    recently used idle page is evicted first, and pages with pinned content after all others.
    """

    def __init__(self, pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        if pages < 1 or page_size < 1:
            raise InvalidValue(f"{pages=} and {page_size=} must both be at least 1")
        self.pages = pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._idle_pinned: OrderedDict[int, None] = OrderedDict()  # idle too, with pinned content
        self._pins: Counter[bytes] = Counter()  # digest -> pins, whether it is cached or not
        self._pinned_evictions = 0
        self._holders = [0] * pages
        self._digest: dict[int, bytes] = {}  # page -> digest of its content
        self._page: dict[bytes, int] = {}  # digest -> page
        self._parent: dict[bytes, bytes] = {}  # digest -> digest of the page before it
        self._children: Counter[bytes] = Counter()  # digest -> number of known digests that follow it
        self._changes: list[bytes] = []
        self._torn = False
        self._readers: list[CacheEvents] = []

    @property
    def available(self) -> int:
        """Free and idle pages."""
        return len(self._free) + len(self._idle) + len(self._idle_pinned)

    @property
    def held(self) -> int:
        return self.pages - self.available

    def count(self, tokens: int) -> int:
        """Return the pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def match(self, digests: Iterable[bytes]) -> int:
        """Return how many leading pages of this prefix are in the cache."""
        hits = 0
        if self.prefix_caching:
            for digest in digests:
                if digest not in self._page:
                    break
                hits += 1
        return hits

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the leading pages of this prefix that are in the cache."""
        return [self._page[digest] for digest in digests[: self.match(digests)]]

    def take(self, digests: Sequence[bytes], fresh: int, reserve: int = 0) -> list[int] | None:
        """Hold the cached pages of `digests` and `fresh` new ones, and return them in this order.

        Returns None, and holds nothing, if fewer than `reserve` pages would remain available.
        """
        cached = [self._page[digest] for digest in digests]
        idle_hits = sum(self._holders[page] == 0 for page in cached)
        if self.available - idle_hits < fresh + reserve:
            return None
        for page in cached:
            if self._holders[page] == 0:
                del self._idle_like(page)[page]
            self._holders[page] += 1
        return cached + [self._new() for _ in range(fresh)]

    def _new(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            if self._idle:
                page, _ = self._idle.popitem(last=False)
            else:
                page, _ = self._idle_pinned.popitem(last=False)
                self._pinned_evictions += 1
            self._forget(self._digest.pop(page))
        self._holders[page] = 1
        return page

    def _idle_like(self, page: int) -> OrderedDict[int, None]:
        """Return the idle pages among which a cached page is, or would be."""
        return self._idle_pinned if self._pins and self._digest[page] in self._pins else self._idle

    def release(self, pages: Sequence[int]) -> None:
        """Release pages. The last page of a prefix becomes idle first, so it is evicted first."""
        for page in reversed(pages):
            left = self._holders[page] - 1
            if left < 0:
                raise AssertionError(f"{page=} released more often than held")
            self._holders[page] = left
            if left == 0:
                if page in self._digest:
                    self._idle_like(page)[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, digest: bytes, parent: bytes) -> None:
        """Record the digest of a held page that is full.

        `parent` is the digest of the page before it (b"" for the first). If another page has the
        same content already, that one stays in the cache.
        """
        if self.prefix_caching and digest not in self._page and page not in self._digest:
            self._page[digest] = page
            self._digest[page] = digest
            self._parent[digest] = parent
            self._children[parent] += 1
            self._note(digest)

    def unregister(self, page: int) -> None:
        """Remove the content of a held page from the prefix cache."""
        digest = self._digest.pop(page, None)
        if digest is not None:
            self._forget(digest)

    def forget_idle(self) -> None:
        """Clear the cache: all idle pages become free."""
        for idle in (self._idle, self._idle_pinned):
            for page in idle:
                self._forget(self._digest.pop(page))
            self._free += idle
            idle.clear()

    # Pins: content that is evicted last.

    @property
    def pins(self) -> int:
        """Digests that are pinned, in the cache or not."""
        return len(self._pins)

    @property
    def pinned(self) -> int:
        """Cached pages with pinned content, idle or held."""
        return sum(digest in self._page for digest in self._pins)

    def pin(self, digests: Iterable[bytes]) -> None:
        """Evict these pages after all others, whenever they are in the cache. Pins are counted."""
        for digest in digests:
            self._pins[digest] += 1
            page = self._page.get(digest)
            if page is not None and page in self._idle:
                del self._idle[page]
                self._idle_pinned[page] = None

    def unpin(self, digests: Iterable[bytes]) -> None:
        """Undo a `pin` of these pages. Those without another pin are evicted next, the last one first."""
        for digest in digests:
            self._pins[digest] -= 1
            if self._pins[digest]:
                continue
            del self._pins[digest]
            page = self._page.get(digest)
            if page is not None and page in self._idle_pinned:
                del self._idle_pinned[page]
                self._idle[page] = None
                self._idle.move_to_end(page, last=False)

    def take_pinned_evictions(self) -> int:
        """Return the pages that were evicted although they were pinned, since the last call."""
        evictions, self._pinned_evictions = self._pinned_evictions, 0
        return evictions

    def check_pins(self, owners: Iterable[Sequence[bytes]]) -> None:
        """Assert that exactly these digests are pinned, and that idle pages are where their pins say."""
        assert self._pins == Counter(digest for digests in owners for digest in digests), "pins and owners differ"
        assert {self._digest[page] for page in self._idle}.isdisjoint(self._pins), "a pinned page is not last"
        assert all(self._digest[page] in self._pins for page in self._idle_pinned), "a page is last without a pin"

    def _forget(self, digest: bytes) -> None:
        del self._page[digest]
        parent = self._parent.pop(digest)
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
        self._torn |= digest in self._children
        self._note(digest)

    def _note(self, digest: bytes) -> None:
        self._changes.append(digest)
        for reader in self._readers:
            reader.note(digest)

    def follow(self) -> CacheEvents:
        """Return what the prefix cache gains and loses from now on; what it has counts as gained."""
        self._readers.append(CacheEvents(self._page))
        return self._readers[-1]

    @property
    def digests(self) -> Collection[bytes]:
        """The prefixes in the cache."""
        return self._page.keys()

    def unfollow(self, reader: CacheEvents) -> None:
        self._readers.remove(reader)

    @property
    def changed(self) -> bool:
        """Whether a prefix was added or removed since `take_changes`."""
        return bool(self._changes)

    def take_changes(self) -> tuple[list[bytes], bool]:
        """Return the digests added or removed since the last call, and whether the cache is torn.

        It is torn if a removed digest has cached pages that follow it.
        """
        changes, torn = self._changes, self._torn
        self._changes, self._torn = [], False
        return changes, torn

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Assert that every page is free, idle or held, and held by exactly the given owners."""
        expected = [0] * self.pages
        for pages in owners:
            for page in pages:
                expected[page] += 1
        assert expected == self._holders, "held pages and owned pages differ"
        free, idle = set(self._free), set(self._idle) | set(self._idle_pinned)
        assert self._idle.keys().isdisjoint(self._idle_pinned), "a page is idle twice"
        held = {page for page, holders in enumerate(self._holders) if holders}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & idle or free & held or idle & held), "a page is in two states"
        assert len(free) + len(idle) + len(held) == self.pages, "a page is lost"
        assert idle <= set(self._digest), "an idle page has no digest"
        assert {page: digest for digest, page in self._page.items()} == self._digest, "digest maps disagree"
