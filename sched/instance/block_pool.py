"""Pages of one instance's KV pool: each is free, idle (cached, evictable) or held, never two.

Prefix sharing is by a real digest of the whole prefix, chained page by page: a collision would show one user
another's context, so Python's `hash` will not do.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from ..api.errors import InvalidValue

DIGEST_SIZE = 16


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a page of tokens that follows the prefix with digest `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST_SIZE).digest()


class BlockPool:
    """Who holds which page. Writer: the Scheduler of the instance.

    Held pages are counted by reference, since a prefix may be shared. A page whose last holder leaves becomes
    idle where its content is known by digest, free otherwise; idle pages are evicted least recently used first.
    """

    def __init__(self, pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        if pages < 1 or page_size < 1:
            raise InvalidValue(f"{pages=} and {page_size=} must both be at least 1")
        self.pages = pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * pages
        self._digest: dict[int, bytes] = {}  # page -> what is in it
        self._page: dict[bytes, int] = {}  # the reverse
        self._parent: dict[bytes, bytes] = {}  # of each known digest: that of the page before it
        self._children: Counter[bytes] = Counter()  # known digests that follow each
        self._changes: list[bytes] = []
        self._torn = False

    @property
    def available(self) -> int:
        """Pages to be had without taking one from a holder."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.pages - self.available

    def count(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill."""
        return -(-tokens // self.page_size)

    def match(self, digests: Iterable[bytes]) -> int:
        """How many leading pages of this prefix are in the cache."""
        hits = 0
        if self.prefix_caching:
            for digest in digests:
                if digest not in self._page:
                    break
                hits += 1
        return hits

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The leading pages of this prefix that are in the cache."""
        return [self._page[digest] for digest in digests[: self.match(digests)]]

    def take(self, digests: Sequence[bytes], fresh: int, reserve: int = 0) -> list[int] | None:
        """Hold the cached pages of `digests` and `fresh` new ones, in this order, or nothing at all (None) where
        fewer than `reserve` pages would be left for others."""
        cached = [self._page[digest] for digest in digests]
        idle_hits = sum(self._holders[page] == 0 for page in cached)
        if self.available - idle_hits < fresh + reserve:
            return None
        for page in cached:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1
        return cached + [self._new() for _ in range(fresh)]

    def _new(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(self._digest.pop(page))
        self._holders[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. The tail of a prefix becomes idle first, so it is evicted first."""
        for page in reversed(pages):
            left = self._holders[page] - 1
            if left < 0:
                raise AssertionError(f"{page=} released more often than held")
            self._holders[page] = left
            if left == 0:
                if page in self._digest:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, digest: bytes, parent: bytes) -> None:
        """A held page is full and its content is this prefix, which goes on from `parent` (b"" where it begins). The
        first page of a content keeps the name."""
        if self.prefix_caching and digest not in self._page and page not in self._digest:
            self._page[digest] = page
            self._digest[page] = digest
            self._parent[digest] = parent
            self._children[parent] += 1
            self._changes.append(digest)

    def unregister(self, page: int) -> None:
        """The content of a held page is not to be found again."""
        digest = self._digest.pop(page, None)
        if digest is not None:
            self._forget(digest)

    def forget_idle(self) -> None:
        """Forget the content of every page that is only cached; all of them are free then."""
        for page in self._idle:
            self._forget(self._digest.pop(page))
        self._free += self._idle
        self._idle.clear()

    def _forget(self, digest: bytes) -> None:
        del self._page[digest]
        parent = self._parent.pop(digest)
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
        self._torn |= digest in self._children
        self._changes.append(digest)

    @property
    def changed(self) -> bool:
        """Whether a prefix has come or gone since `take_changes`."""
        return bool(self._changes)

    def take_changes(self) -> tuple[list[bytes], bool]:
        """The digests that have come or gone since the last call, and whether one went that others here follow."""
        changes, torn = self._changes, self._torn
        self._changes, self._torn = [], False
        return changes, torn

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Conservation: every page is free, idle or held by exactly the given owners. Raises AssertionError."""
        expected = [0] * self.pages
        for pages in owners:
            for page in pages:
                expected[page] += 1
        assert expected == self._holders, "pages held and pages owned differ"
        free, idle = set(self._free), set(self._idle)
        held = {page for page, holders in enumerate(self._holders) if holders}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & idle or free & held or idle & held), "a page is in two states"
        assert len(free) + len(idle) + len(held) == self.pages, "a page is lost"
        assert idle <= set(self._digest), "an idle page has no digest"
        assert {page: digest for digest, page in self._page.items()} == self._digest, "digest maps disagree"
