"""Copies of KV pages from the devices of one process to those of another, by jax.experimental.transfer.

The process that gives offers arrays under a random number, and the process that takes pulls them.
An offer that is not pulled ends after a while, because jax holds the arrays until then. Whoever
reaches the port and knows the number can pull: it is random, and known to the two processes only.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import jax

from jaxserve.wire.address import Address

LOCAL = "127.0.0.1"
ANY = ("0.0.0.0", "::", "")  # nosec B104: no address that another process could connect to


class Direct:
    """The transfer server of this process, started with it. May be used by several threads."""

    def __init__(self, host: str = LOCAL) -> None:
        """Raise RuntimeError if jax cannot start it."""
        from jax.experimental import transfer

        client = jax.devices()[0].client
        self._server: Any = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
        self.address: str = self._server.address()
        self._connections: dict[str, Any] = {}

    def offer(self, arrays: Sequence[jax.Array], seconds: float) -> int:
        """Offer arrays for some seconds, and return their number. They must not be deleted meanwhile."""
        number = secrets.randbits(62)
        self._server.await_pull(number, list(arrays), _after(seconds))
        return number

    def pull(self, address: str, number: int, shapes: Sequence[Any], seconds: float) -> tuple[jax.Array, ...]:
        """Pull arrays of these shapes and shardings, and wait for them. Raises RuntimeError if they do not come."""
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = self._server.connect(address)
        try:
            arrays: list[jax.Array] = connection.pull(number, list(shapes), _after(seconds))
            jax.block_until_ready(arrays)
        except Exception:
            self._connections.pop(address, None)  # the other process may be gone, and another come in its place
            raise
        return tuple(arrays)


def direct_host(address: Address) -> str | None:
    """Return the host on which a process that listens at `address` can offer arrays; None if it names none."""
    if address.path:
        return LOCAL
    return None if address.host in ANY else address.host


def _after(seconds: float) -> datetime:
    return datetime.now() + timedelta(seconds=seconds)  # jax takes local times
