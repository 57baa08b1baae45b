"""Best-effort requests that wait beyond those which a policy is shown.

What a policy looks at costs time in every step. Best effort is served from what the others leave, so that of thousands
that wait only the first few can matter to the next step: the rest is kept here, in order, and costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ..api.request import Request
from .table import Key, key

SHOWN = 4  # waiting best-effort requests that policies see for each row of an instance
LEAST = 64  # at least that many


def shown(rows: int) -> int:
    """How many waiting best-effort requests of an instance with so many rows its policy sees."""
    return max(LEAST, SHOWN * rows)


class WaitingRoom:
    """Requests by the order of service. Writer: the Roster that holds it."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._requests: dict[int, Request] = {}
        self.backlog = 0  # tokens to compute; what the prefix cache may hold of them is not looked up

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, id: int) -> bool:
        return id in self._requests

    def add(self, request: Request) -> None:
        insort(self._keys, key(request))
        self._requests[request.id] = request
        self.backlog += request.remaining

    def discard(self, request: Request) -> None:
        """Take a request out; nothing where it is not here."""
        if self._requests.pop(request.id, None) is None:
            return
        place = key(request)
        at = bisect_left(self._keys, place)
        assert self._keys[at] == place, f"{request} is not in its place"
        del self._keys[at]
        self.backlog -= request.remaining

    def first(self) -> Request | None:
        """The request that is served next; None without one."""
        return self._requests[self._keys[0][3]] if self._keys else None
