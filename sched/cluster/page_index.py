"""Which pages a KV tier holds, and which of them to evict: by recompute cost times hit rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

SLACK = 4  # stale entries of the heap per page before it is built again


class Entry:
    """A page of a tier. Writer: its PageIndex."""

    __slots__ = ("cost", "key", "parent", "ready", "uses")

    def __init__(self, parent: bytes, cost: float, uses: int) -> None:
        self.parent = parent
        self.cost = cost
        self.uses = uses
        self.ready = False  # written: it can be found, and evicted
        self.key = (0.0, 0)  # of its valid heap entry: value, and order among equals


class PageIndex:
    """The pages of a tier with room for `capacity` pages. Writer: the KVTier that owns it.

    The page of least value is evicted first, the least recently used one among equals:

        value = age + cost * uses

    `cost` is the predicted seconds to recompute the page and `uses` its number of hits so far plus
    one, so their product is cost times hit rate as long as pages are equally old. `age` is what the
    last evicted page was worth at the time of the page's last use. It only grows, so a page that is
    not used any more is evicted however often it was used (GreedyDual-Size-Frequency: Cherkasova,
    HPL-98-69R1).

    A prefix is found up to its first missing page, so only pages without a successor in the tier
    are evicted: prefixes lose their ends first, and no page is kept that cannot be found.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = 0
        self._pages: dict[bytes, Entry] = {}
        self._children: Counter[bytes] = Counter()  # digest -> pages of the tier that follow it
        self._heap: list[tuple[float, int, bytes]] = []
        self._age = 0.0
        self._order = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        """Return whether the page is here, or is being written."""
        return digest in self._pages

    def match(self, digests: Iterable[bytes]) -> int:
        """Return how many leading pages are here."""
        hits = 0
        for digest in digests:
            entry = self._pages.get(digest)
            if entry is None or not entry.ready:
                break
            hits += 1
        return hits

    def add(self, digest: bytes, parent: bytes, cost: float, uses: int = 1) -> bool:
        """Take in a page that is not here, to be found once it is `written`. Returns False if there is no room."""
        if len(self._pages) >= self.capacity:
            return False
        self._pages[digest] = Entry(parent, cost, uses)
        self._children[parent] += 1
        return True

    def evict(self, parent: bytes = b"") -> tuple[bytes, Entry] | None:
        """Evict the page of least value, but not `parent`, and return it.

        None if there is none, because every other page is being written or has successors.
        """
        least = self._least(parent)
        if least is None:
            return None
        entry = self._pages[least]
        self.evictions += 1
        self.discard(least)
        return least, entry

    def clear(self) -> list[bytes]:
        """Forget all pages, and return them."""
        pages = list(self._pages)
        self._pages.clear()
        self._children.clear()
        self._heap.clear()
        return pages

    def ranked(self) -> Iterator[tuple[bytes, Entry]]:
        """Yield the pages that can be found, the most valuable first, but each after the pages before it."""
        done: set[bytes] = set()
        ready = ((digest, entry) for digest, entry in self._pages.items() if entry.ready)
        for digest, _ in sorted(ready, key=lambda item: item[1].key, reverse=True):
            line = []
            while digest in self._pages and digest not in done:
                done.add(digest)
                line.append(digest)
                digest = self._pages[digest].parent
            yield from ((page, self._pages[page]) for page in reversed(line) if self._pages[page].ready)

    def written(self, digest: bytes) -> None:
        """Record that a page can be found from now on."""
        entry = self._pages.get(digest)
        if entry is not None:
            entry.ready = True
            self._value(digest, entry)

    def use(self, digests: Sequence[bytes]) -> None:
        """Count a hit of pages. The last one counts as the least recently used."""
        for digest in reversed(digests):
            entry = self._pages.get(digest)
            if entry is not None:
                entry.uses += 1
                self._value(digest, entry)

    def discard(self, digest: bytes) -> None:
        """Forget a page, if it is here."""
        entry = self._pages.pop(digest, None)
        if entry is None:
            return
        parent = entry.parent
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._pages:
                self._push(parent, self._pages[parent])

    def _least(self, parent: bytes) -> bytes | None:
        """Return the page of least value that may be evicted: written, without successors, not `parent`."""
        spared: list[tuple[float, int, bytes]] = []
        least = None
        while self._heap:
            value, order, digest = item = heappop(self._heap)
            entry = self._pages.get(digest)
            if entry is None or entry.key != (value, order) or digest in self._children:
                continue
            if digest == parent:
                spared.append(item)
                continue
            self._age = max(self._age, value)
            least = digest
            break
        for item in spared:
            heappush(self._heap, item)
        return least

    def _value(self, digest: bytes, entry: Entry) -> None:
        self._order += 1
        entry.key = (self._age + entry.cost * entry.uses, self._order)
        self._push(digest, entry)

    def _push(self, digest: bytes, entry: Entry) -> None:
        if entry.ready and digest not in self._children:
            heappush(self._heap, (*entry.key, digest))
            if len(self._heap) > SLACK * len(self._pages) + 64:
                live = ((d, e) for d, e in self._pages.items() if e.ready and d not in self._children)
                self._heap = [(*e.key, d) for d, e in live]
                heapify(self._heap)
