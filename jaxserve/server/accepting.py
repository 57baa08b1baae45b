"""Accept connections one at a time, so that thousands at once stop no stream."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger("jaxserve.server")

PAUSE = 1.0  # seconds until the next try after an error


class Acceptor:
    """The part of an `asyncio.Server` that accepts. That one takes all connections that wait in one go.

    Writer: its event loop.
    """

    def __init__(
        self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None, backlog: int
    ) -> None:
        sock.setblocking(False)
        sock.listen(backlog)
        self._sock = sock
        self._protocol = protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening = set[asyncio.Task[None]]()
        self._task = asyncio.ensure_future(self._accept())

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._sock)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no more files or memory, as a rule
                logger.error("no connection can be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE)
                continue
            opening = asyncio.ensure_future(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
            await asyncio.sleep(0)  # streams go on

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
        except OSError as error:  # of the client, or of its TLS
            logger.debug("a connection was not opened: %s", error)
            connection.close()

    def close(self) -> None:
        self._loop.remove_reader(self._sock)  # before its owner closes it
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Return: connections are waited for by their server."""
