"""Connections within a test."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from jaxserve.wire.blocking import BlockingConnection
from jaxserve.wire.connection import Side

KEY = b"of the two ends in a test"


def connected(
    keys: tuple[bytes, bytes] = (KEY, KEY), sides: tuple[Side, Side] = ("engine", "front")
) -> tuple[BlockingConnection, BlockingConnection]:
    """Return both ends of a connection. Raises what the first one raises."""
    socks = socket.socketpair()
    with ThreadPoolExecutor(2) as both:
        ends = [both.submit(BlockingConnection, *one) for one in zip(socks, keys, sides, strict=True)]
        return ends[0].result(), ends[1].result()
