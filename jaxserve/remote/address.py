"""Where an engine listens: a socket of the file system for processes of one machine, TCP for several."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from jaxserve.errors import InvalidValue, short

Factory = Callable[[], asyncio.Protocol]
UNIX = "unix:"


class Address(NamedTuple):
    """`unix:PATH`, or `HOST:PORT`; port 0: any free one."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raise InvalidValue naming the two forms."""
        if text.startswith(UNIX) and len(text) > len(UNIX):
            return cls(path=text.removeprefix(UNIX))
        host, colon, port = text.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) <= 65535):
            raise InvalidValue(f"address={short(text)} must be HOST:PORT or unix:PATH", "address")
        return cls(host=host.strip("[]"), port=int(port))

    def __str__(self) -> str:
        if self.path:
            return UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def vacate(self) -> None:
        """Remove the socket that a killed process has left in the file system."""
        if self.path:
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    async def listen(self, accept: Factory) -> tuple[asyncio.Server, Address]:
        """Listen, and return the bound address too. Raises InvalidValue with the reason."""
        loop = asyncio.get_running_loop()
        try:
            if self.path:
                before = os.umask(0o177)  # the socket belongs to this user alone
                try:
                    return await loop.create_unix_server(accept, self.path), self
                finally:
                    os.umask(before)
            server = await loop.create_server(accept, self.host, self.port)
        except OSError as error:
            raise InvalidValue(f"cannot listen on {self} ({error.strerror or error})", "address") from error
        return server, self._replace(port=server.sockets[0].getsockname()[1])

    async def connect(self, made: Factory) -> None:
        """Connect. Raises InvalidValue with the reason."""
        loop = asyncio.get_running_loop()
        try:
            if self.path:
                await loop.create_unix_connection(made, self.path)
            else:
                await loop.create_connection(made, self.host, self.port)
        except OSError as error:
            raise InvalidValue(f"no engine answers at {self} ({error.strerror or error})", "address") from error


class Place(NamedTuple):
    """Where an engine listens, the key that fronts need, and what messages call it."""

    address: Address
    key: bytes
    name: str = "the engine process"
