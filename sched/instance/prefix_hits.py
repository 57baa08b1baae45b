"""Expected prefix-cache hits of waiting prompts, updated when the cache changes (Kairos, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator

from ..api.request import Request
from .kv_manager import KVManager


class PrefixHits:
    """The maintainer of `request.hit`, the cached prompt tokens of each waiting request. Writer: the Scheduler.

    A hit ends at a frontier: the last cached page of the prefix, and the first page that is not
    cached. It changes only if one of these two does, so an index of the frontier digests finds the
    affected requests without a search of all waiting ones. Pages are usually evicted from the end
    of a prefix. If one from the middle goes, which can happen after two requests computed the same
    prefix at once, all hits are looked up again.
    """

    def __init__(self, memory: KVManager) -> None:
        self._kv = memory
        self._requests: dict[int, Request] = {}
        self._watched: dict[int, tuple[bytes, ...]] = {}  # request id -> digests at its frontier
        self._watchers: dict[bytes, dict[int, None]] = {}  # digest -> request ids, in a deterministic order

    def __contains__(self, id: int) -> bool:
        return id in self._requests

    def __iter__(self) -> Iterator[int]:
        return iter(self._requests)

    def watch(self, request: Request) -> None:
        """Compute the hit of a request that begins to wait, and keep it up to date."""
        self._requests[request.id] = request
        self._stand(request, len(self._kv.cached(request)))

    def unwatch(self, id: int) -> None:
        """Forget a request that no longer waits."""
        if self._requests.pop(id, None) is not None:
            self._leave(id)

    def refresh(self) -> Iterator[Request]:
        """Apply the changes of the cache since the last call. Yields the requests with a new hit."""
        blocks = self._kv.blocks
        if not blocks.changed:
            return
        changed, torn = blocks.take_changes()
        ids = dict.fromkeys(self._requests if torn else ())
        for digest in changed:
            ids |= self._watchers.get(digest, {})
        for id in ids:
            request = self._requests[id]
            before = request.hit
            self._leave(id)
            self._stand(request, self._pages(request, 0 if torn else before // blocks.page_size))
            if request.hit != before:
                yield request

    def check(self) -> None:
        """Assert that every hit equals a fresh lookup."""
        if not self._kv.blocks.changed:
            for request in self._requests.values():
                cached = len(self._kv.cached(request)) * self._kv.blocks.page_size
                assert request.hit == cached, f"{request} has a hit of {request.hit} tokens, but {cached} are cached"

    def _pages(self, request: Request, pages: int) -> int:
        """Return the cached pages of the prefix, searching from the previous count `pages`."""
        blocks, digests = self._kv.blocks, self._kv.sought(request)
        while pages and not blocks.match(digests[pages - 1 : pages]):
            pages -= 1
        return pages + blocks.match(digests[pages:])

    def _stand(self, request: Request, pages: int) -> None:
        request.hit = pages * self._kv.blocks.page_size
        frontier = tuple(self._kv.sought(request)[max(0, pages - 1) : pages + 1])
        self._watched[request.id] = frontier
        for digest in frontier:
            self._watchers.setdefault(digest, {})[request.id] = None

    def _leave(self, id: int) -> None:
        for digest in self._watched.pop(id):
            watchers = self._watchers[digest]
            del watchers[id]
            if not watchers:
                del self._watchers[digest]
