"""Connections are accepted one at a time, and other work of the loop goes on between them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from jaxserve.server.accepting import Acceptor
from jaxserve.server.serving import loop_factory

WAITING = 100


@pytest.mark.parametrize("factory", [None, loop_factory()], ids=["asyncio", "default"])
def test_other_work_goes_on_between_connections(factory: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
    events: list[str] = []

    class Noted(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            events.append("connection")
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.close()

    async def main() -> None:
        with ExitStack() as open_:
            sock = open_.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2 * WAITING))
            for _ in range(WAITING):
                open_.enter_context(socket.create_connection(sock.getsockname()))
            acceptor = Acceptor(sock, Noted, None, 2 * WAITING)
            while events.count("connection") < WAITING:
                events.append("turn")
                await asyncio.sleep(0)
            acceptor.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    together = "".join(event[0] for event in events).split("t")
    assert max(map(len, together)) <= 2, together


def test_a_closed_acceptor_accepts_no_more() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            acceptor = Acceptor(sock, asyncio.Protocol, None, 8)
            await asyncio.sleep(0)
            acceptor.close()
            await asyncio.sleep(0)
            with socket.create_connection(sock.getsockname()):
                await asyncio.sleep(0.05)
                connection, _ = sock.accept()  # it still waits
                connection.close()

    asyncio.run(main())
