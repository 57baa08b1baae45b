"""Responses that clients may continue, retrieve and delete: in memory, bounded in number, bytes and time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.errors import short
from jaxserve.server.failures import Refused

MAX_STORED = 10_000  # responses
TTL = 3600.0  # seconds that a response is kept after it was made


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as JSON, so that its size is known."""

    client: str  # name of the API key
    response: bytes
    given: bytes  # its input
    messages: bytes  # of chat, up to its end; without instructions

    @property
    def size(self) -> int:
        return len(self.response) + len(self.given) + len(self.messages)


class Store:
    """The responses of a server. Those used longest ago leave first. Writer: the server's event loop."""

    def __init__(self, size: int, ttl: float = TTL, clock: Callable[[], float] = time.monotonic) -> None:
        """size: most bytes; 0 stores nothing. ttl: see `TTL`."""
        self._most = size
        self._ttl = ttl
        self._clock = clock
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # by last use
        self._ends: dict[str, float] = {}  # when each expires, in that order
        self.size = 0  # bytes

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def enabled(self) -> bool:
        return self._most > 0

    def put(
        self, client: str, response: dict[str, Any], given: str | Sequence[Any], messages: Sequence[dict[str, Any]]
    ) -> None:
        """Store a response, and the input as it was given. One that is larger than the store is not kept."""
        encode = msgspec.json.encode
        entry = Stored(client, encode(response), encode(given), encode(messages))
        self._expire()
        if entry.size > self._most:
            return
        self._stored[response["id"]] = entry
        self._ends[response["id"]] = self._clock() + self._ttl
        self.size += entry.size
        while self.size > self._most or len(self._stored) > MAX_STORED:
            self._drop(next(iter(self._stored)))

    def get(self, client: str, id: str, field: str) -> Stored:
        """Return a response of a client. Raises Refused (404) that names the field with the id."""
        self._expire()
        entry = self._stored.get(id)
        if entry is None or entry.client != client:
            why = "" if self.enabled else "; this server stores none (--response-store-size)"
            raise Refused(404, f"{field}={short(id)}: there is no such response{why}", field, "response_not_found")
        self._stored.move_to_end(id)
        return entry

    def delete(self, client: str, id: str) -> None:
        """Forget a response. Raises Refused (404) as `get` does."""
        self.get(client, id, "response_id")
        self._drop(id)

    def _expire(self) -> None:
        now = self._clock()
        while self._ends:
            id = next(iter(self._ends))
            if self._ends[id] > now:
                break
            self._drop(id)

    def _drop(self, id: str) -> None:
        self.size -= self._stored.pop(id).size
        del self._ends[id]
