"""KV pages outside the pool of an instance: in host memory, on disk, or in another process.

A page is known by the digest of the whole prefix that it ends (`instance/block_pool.py`), so a page
from anywhere has the KV that the instance would compute. A source may therefore be late, short,
wrong about what it has, or dead: the instance then computes these tokens itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .plan import KVBuffer
from .request import Request


class KVSource(Protocol):
    """A place from which KV pages can be fetched. Called in the event loop of the Cluster."""

    def find(self, request: Request, digests: Sequence[bytes]) -> int:
        """Return how many leading pages of `digests` it has, or is told to expect. Without I/O.

        `digests` are consecutive pages of the request, and need not begin with its first one.
        """

    def seconds(self, pages: int) -> float:
        """Predict the seconds to fetch this many pages."""

    async def fetch(self, request: Request, digests: Sequence[bytes], start: int) -> KVBuffer | None:
        """Return the KV of pages [start, n) with start < n <= len(digests), as `Executor.import_kv` takes it.

        `pages` of the buffer is their number. None if they are not there after all. It is called
        again for the pages after n, and is cancelled if the request stops waiting for it.
        """
