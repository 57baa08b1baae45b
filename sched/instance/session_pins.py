"""The prefixes of sessions that stay in the prefix cache while a client runs a tool between two turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .block_pool import BlockPool


class Pin(NamedTuple):
    """The pages that one session keeps."""

    digests: tuple[bytes, ...]
    at: float  # end of its last turn, executor's clock


class PinTotals(NamedTuple):
    """What ended pins."""

    expired: int = 0  # sessions: older than the timeout
    displaced: int = 0  # sessions: more recent ones took their share
    evicted: int = 0  # pages: running requests needed them


class SessionPins:
    """The pinned prefix of each session, of its last turn. Writer: the KVManager.

    A pin is a wish: the pool evicts pinned pages after all others, but before any request waits for
    memory. Pins never hold pages, so they change which pages are evicted and nothing else.
    """

    def __init__(self, blocks: BlockPool, share: float, timeout: float) -> None:
        """`share`: of the pool's pages, the most that are pinned. `timeout`: the oldest age of a pin in seconds."""
        self.most = int(share * blocks.pages)
        self.timeout = timeout
        self._blocks = blocks
        self._pins: OrderedDict[str, Pin] = OrderedDict()  # least recently used first
        self._last = 0.0
        self._expired = self._displaced = 0

    def __iter__(self) -> Iterator[Pin]:
        """Iterate over the pins, least recently used first."""
        return iter(self._pins.values())

    def pages_of(self, session: str) -> int:
        """Return the pages that a session pins, in the cache or not."""
        return len(self._pins[session].digests) if session in self._pins else 0

    def pin(self, session: str, digests: Sequence[bytes], at: float) -> None:
        """Pin a cached prefix for a session in place of that of its turn before.

        Of a prefix above the bound only the beginning is pinned. The least recent sessions make room.
        """
        self._last = max(self._last, at)
        kept = tuple(digests[: self.most])
        self._blocks.pin(kept)  # before the old pin ends, so that what they share stays where it is
        self._drop(session)
        if kept:
            self._pins[session] = Pin(kept, self._last)
        while self._blocks.pins > self.most or len(self._pins) > self.most:
            self._drop(next(iter(self._pins)))
            self._displaced += 1

    def expire(self, now: float) -> None:
        """End the pins that are older than the timeout."""
        while self._pins:
            session, pin = next(iter(self._pins.items()))
            if now - pin.at <= self.timeout:
                break
            self._drop(session)
            self._expired += 1

    def end(self, session: str) -> bool:
        """End the pin of a session; return whether it had one."""
        had = session in self._pins
        self._drop(session)
        return had

    def clear(self) -> None:
        """End all pins."""
        for session in list(self._pins):
            self._drop(session)

    def _drop(self, session: str) -> None:
        pin = self._pins.pop(session, None)
        if pin is not None:
            self._blocks.unpin(pin.digests)

    def take_totals(self) -> PinTotals:
        """Return what ended pins since the last call."""
        totals = PinTotals(self._expired, self._displaced, self._blocks.take_pinned_evictions())
        self._expired = self._displaced = 0
        return totals

    def check(self) -> None:
        """Assert that the pool's pins are those of the sessions, within the bound."""
        self._blocks.check_pins(pin.digests for pin in self._pins.values())
        assert self._blocks.pinned <= self._blocks.pins <= self.most, "more pages are pinned than may be"
        ages = [pin.at for pin in self._pins.values()]
        assert ages == sorted(ages), "sessions are out of order"
