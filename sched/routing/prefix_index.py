"""Which instances have which prefixes in their caches, by the events that the instances send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..api.request import Request
from ..instance.block_pool import next_digest

KEPT = 8  # bytes of a digest: a wrong match only makes an estimate wrong

Hits = np.ndarray[Any, np.dtype[np.int64]]


class PrefixIndex:
    """An index of the prefix caches of many instances with one page size. Writer: the receiver of their events.

    It needs memory per page and not per page and instance where instances have the same prefix.
    """

    def __init__(self, page_size: int, instances: int) -> None:
        self._page_size = page_size
        self._instances = instances
        self._holders: dict[bytes, int] = {}  # digest -> the instances that have it, one bit each
        self._masks = [1 << at for at in range(instances)]  # the bit of each
        self._pages = [0] * instances  # prefixes that each has
        self._nothing: Hits = np.zeros(instances, dtype=np.int64)
        self._last: tuple[Request | None, Hits] = None, self._nothing  # the last result of `hits`

    def __len__(self) -> int:
        """Return the number of different prefixes."""
        return len(self._holders)

    def update(self, instance: int, gained: Iterable[bytes], lost: Iterable[bytes]) -> None:
        """Apply the events of an instance, in digests of KEPT bytes."""
        holders, bit, pages = self._holders, self._masks[instance], self._pages[instance]
        for digest in gained:
            have = holders.get(digest, 0)
            if not have & bit:
                holders[digest] = have | bit if have else bit  # the same object for all that only this instance has
                pages += 1
        for digest in lost:
            have = holders.get(digest, 0)
            if have == bit:
                del holders[digest]
            elif have & bit:
                holders[digest] = have ^ bit
            else:
                continue
            pages -= 1
        self._pages[instance] = pages
        self._last = None, self._nothing

    def clear(self, instance: int) -> None:
        """Forget the cache of an instance. Reads the index once, unless the instance has nothing."""
        if self._pages[instance]:
            bit = self._masks[instance]
            self.update(instance, (), [digest for digest, holders in self._holders.items() if holders & bit])

    def hits(self, request: Request) -> Hits:
        """Return the prompt tokens of a request that are in each cache. Hashes no page that is in none."""
        if self._last[0] is not request:
            self._last = request, self._search(request)
        return self._last[1]

    def _search(self, request: Request) -> Hits:
        if not self._holders or request.params.whole_prompt:
            return self._nothing
        hits, tokens = self._nothing.copy(), 0
        have = (1 << self._instances) - 1
        for digest in self._digests(request):
            holders = self._holders.get(digest[:KEPT], 0) & have
            if holders != have:
                hits[self._bits(have & ~holders)] = tokens
                have = holders
                if not have:
                    return hits
            tokens += self._page_size
        hits[self._bits(have)] = tokens
        return hits

    def _digests(self, request: Request) -> Iterator[bytes]:
        """Yield the digests of the pages that a hit may have: one token is left to compute."""
        known, size = request.digests, self._page_size
        for page in range((request.known - max(1, request.pending)) // size):
            yield known[page] if page < len(known) else next_digest(request, size)

    def _bits(self, instances: int) -> Any:
        """Return a mask, as an array, from one in the bits of a number."""
        packed = np.frombuffer(instances.to_bytes(-(-self._instances // 8), "little"), dtype=np.uint8)
        return np.unpackbits(packed, count=self._instances, bitorder="little").view(np.bool_)
