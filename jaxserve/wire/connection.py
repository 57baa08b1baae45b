"""A connection between two processes of one deployment: frames, and proof of a shared key.

A frame is its length, four bytes big-endian, and its bytes. Both ends first prove that they have
the key, without sending it: each answers the other's random challenge with an HMAC (RFC 2104) that
names its side, so that no answer of an engine passes for one of a front. A connection is lost as
soon as the other process ends, however it ends.

A frame holds msgpack of fixed types, so that decoding runs no code of the other process, unlike pickle.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from typing import Literal, cast

import msgspec

Side = Literal["front", "engine"]

LONGEST = 1 << 28  # bytes of a frame
CHALLENGE = 32  # bytes
HANDSHAKE = 10.0  # seconds for the proof of the key
UNPROVED = 64  # connections of a listener without a proof; with more, the oldest of them is closed
BUFFERED = 1 << 16  # bytes that may wait for the other end when `drained` returns
UNREAD = 1 << 27  # bytes that may wait for the other end, which has stopped reading if there are more


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


encode = msgspec.msgpack.Encoder().encode


class Connection(asyncio.Protocol):
    """One end of a connection. Writer: its event loop."""

    def __init__(
        self,
        key: bytes,
        side: Side,
        *,
        opened: Callable[[Connection], None],
        received: Callable[[bytes], None],
        lost: Callable[[str], None],
        unproved: dict[Connection, None] | None = None,
    ) -> None:
        """Create the end of `side`, for `loop.create_connection` and its kin.

        `opened` is called once the other end has proved the key, `received` with each frame after that,
        and `lost` once at the end, with the reason. unproved: the connections of the same listener that
        have not proved the key, oldest first.
        """
        self._key, self._side = key, side
        self._opened, self._received, self._lost = opened, received, lost
        self._unproved = {} if unproved is None else unproved
        self._longest = CHALLENGE  # bytes of a frame; LONGEST once the key is proved
        self._mine = secrets.token_bytes(CHALLENGE)
        self._frames: Callable[[bytes], None] = self._challenged
        self._buffer = bytearray()
        self._why = "the other process closed the connection"
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send(self, frame: bytes) -> None:
        """Send a frame. Does nothing if the connection is lost; ends it if the other end does not read."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > UNREAD:
            self.close(f"the other process left {UNREAD >> 20} MiB unread")
            return
        transport.writelines((len(frame).to_bytes(4, "big"), frame))

    @property
    def crowded(self) -> bool:
        """Whether so much waits for the other end that nothing large should be sent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > UNREAD // 2

    async def drained(self) -> None:
        """Wait until the other end has read most of what was sent, or the connection is lost.

        It looks at the buffer, since `writelines` of Python 3.12 does not call `pause_writing`.
        """
        while self._transport is not None and self._transport.get_write_buffer_size() > BUFFERED:
            await asyncio.sleep(0.001)

    def close(self, why: str = "closed") -> None:
        """Close the connection; `lost` is called soon, with the reason."""
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no asyncio class
        no_delay(transport.get_extra_info("socket"))
        late = f"no proof of the key within {HANDSHAKE:g} s"
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE, self.close, late)
        self._unproved[self] = None
        if len(self._unproved) > UNPROVED:
            next(iter(self._unproved)).close("too many connections without proof of the key")
        self.send(self._mine)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "big")
            if size > self._longest:
                self.close(f"a frame of {size} bytes, at most {self._longest} are allowed")
                return
            if len(buffer) - at - 4 < size:
                break
            with memoryview(buffer) as whole:  # a slice of a bytearray would be one more copy
                frame = bytes(whole[at + 4 : at + 4 + size])
            self._frames(frame)
            at += 4 + size
            if self._transport is None or self._transport.is_closing():
                return
        del buffer[:at]

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        self._unproved.pop(self, None)
        self._lost(f"{self._why} ({error})" if error is not None else self._why)

    # the proof of the key

    def _challenged(self, challenge: bytes) -> None:
        if len(challenge) != CHALLENGE:
            self.close("not a jaxserve process")
            return
        self._frames = self._proved
        self.send(proof(self._key, self._side, challenge))

    def _proved(self, given: bytes) -> None:
        if not hmac.compare_digest(given, proof(self._key, other(self._side), self._mine)):
            self.close("the other process has another key")
            return
        if self._timer is not None:
            self._timer.cancel()
        self._frames, self._longest = self._received, LONGEST
        self._unproved.pop(self, None)
        self._opened(self)


def proof(key: bytes, side: Side, challenge: bytes) -> bytes:
    """Return what the end of `side` answers to a challenge."""
    return hmac.digest(key, side.encode() + challenge, "sha256")


def other(side: Side) -> Side:
    return "front" if side == "engine" else "engine"


def no_delay(sock: socket.socket) -> None:
    """Turn off the delay, up to 40 ms, that TCP adds to small frames, and notice a machine that is gone."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
