"""A listed address: an engine that starts at another one is found there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidValue
from jaxserve.wire.address import Address


class Closing(asyncio.Protocol):
    """An end of a connection that closes it."""

    def connection_made(self, transport: Any) -> None:
        transport.abort()


def test_a_listed_address_is_read_at_each_connection(tmp_path: Path) -> None:
    async def work() -> list[int]:
        met: list[int] = []
        listed = Address(listed=str(tmp_path / "0"))
        for _ in range(2):
            server, bound = await Address(host="127.0.0.1").listen(Closing)
            listed.publish(bound)
            assert str(listed) == str(bound) and listed.current() == bound
            await listed.connect(Closing)
            met.append(bound.port)
            await asyncio.sleep(0.01)
            server.close()
        return met

    first, second = asyncio.run(work())
    assert first != second and [path.name for path in tmp_path.iterdir()] == ["0"]


def test_an_address_that_is_not_known_yet(tmp_path: Path) -> None:
    listed = Address(listed=str(tmp_path / "0"))
    assert str(listed) == "no address yet"
    with pytest.raises(InvalidValue, match="the engine has no address yet"):
        asyncio.run(listed.connect(Closing))
