"""A connection whose ends wait: the same frames and the same proof as in connection.py, for threads without a loop."""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time

from jaxserve.wire.connection import CHALLENGE, HANDSHAKE, LONGEST, Side, no_delay, other, proof


class Disconnected(ConnectionError):
    """The other process has closed the connection, or has another key."""


class BlockingConnection:
    """One end of a connection. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, key: bytes, side: Side) -> None:
        """Prove the key to the other end, which proves it too. Raises Disconnected if it does not, and OSError."""
        self._sock = sock
        try:
            no_delay(sock)
            end, mine = time.monotonic() + HANDSHAKE, secrets.token_bytes(CHALLENGE)
            self.send(mine)
            self.send(proof(key, side, self._within(end)))
            if not hmac.compare_digest(self._within(end), proof(key, other(side), mine)):
                raise Disconnected("the other process has another key")
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise

    def _within(self, end: float) -> bytes:
        """Return a frame of the proof."""
        self._sock.settimeout(max(1e-3, end - time.monotonic()))
        return self.receive(CHALLENGE)

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises OSError if the other end is gone."""
        self._sock.sendall(len(frame).to_bytes(4, "big") + frame)

    def receive(self, longest: int = LONGEST) -> bytes:
        """Wait for a frame. Raises Disconnected if the other end closes, or sends a frame above `longest` bytes."""
        size = int.from_bytes(self._exactly(4), "big")
        if size > longest:
            raise Disconnected(f"a frame of {size} bytes, at most {longest} are allowed")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._sock.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise Disconnected("the other process closed the connection")
            parts += part
        return bytes(parts)

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait until something has arrived, at most so many seconds, and return whether it has."""
        return bool(select.select([self._sock], [], [], seconds)[0])

    def close(self) -> None:
        self._sock.close()


class Listener:
    """Accepts connections of processes that have the key."""

    def __init__(self, host: str, key: bytes, port: int = 0) -> None:
        """port 0: any free one. Raises OSError."""
        self._sock, self._key = socket.create_server((host, port)), key
        self.address: tuple[str, int] = self._sock.getsockname()[:2]

    def accept(self) -> BlockingConnection:
        """Wait for a process that has the key; others are turned away."""
        while True:
            sock, _ = self._sock.accept()
            try:
                return BlockingConnection(sock, self._key, "engine")
            except OSError:
                continue

    def close(self) -> None:
        self._sock.close()


def connect(address: tuple[str, int], key: bytes) -> BlockingConnection:
    """Connect to a process that listens. Raises OSError."""
    return BlockingConnection(socket.create_connection(address), key, "front")
