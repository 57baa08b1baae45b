"""A transport that sends late in a turn of the event loop, so that clients wake up once a step.

The tokens of a step reach many connections in one turn. A client process that sleeps is woken by the
first byte; were the next connection written only after more Python code, it could be asleep again.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Corked:
    """A transport that keeps what is written until all tasks that are ready have run. Writer: its protocol."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keep `data`; it is sent in the next turn of the event loop."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Send what is kept, and close the transport."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():  # the client may have reset the connection meanwhile
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))
