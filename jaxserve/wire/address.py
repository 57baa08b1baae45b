"""Where an engine listens: a socket of the file system for processes of one machine, TCP for several."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxserve.errors import InvalidValue, short
from jaxserve.whole_file import write_whole

Factory = Callable[[], asyncio.Protocol]
UNIX = "unix:"
CONNECTING = 10.0  # seconds for a connection to another machine, which may be gone


class Address(NamedTuple):
    """`unix:PATH`, or `HOST:PORT`; port 0: any free one.

    listed: a file with the address, which is read at each connection. So an engine is found again that
    has started at another address.
    """

    path: str = ""
    host: str = ""
    port: int = 0
    listed: str = ""

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
        if self.listed:
            return str(self.current()) if Path(self.listed).exists() else "no address yet"
        if self.path:
            return UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def folder(self) -> Path | None:
        """The folder in which fronts of this machine find the engine; None: they do not need one."""
        file = self.path or self.listed
        return Path(file).parent if file else None

    def vacate(self) -> None:
        """Remove what an engine that has ended has left in the file system: its socket, or its address."""
        for left in filter(None, (self.path, self.listed)):
            with suppress(FileNotFoundError):
                os.unlink(left)

    def current(self) -> Address:
        """Return the address to connect to. Raises InvalidValue if the file does not have one yet."""
        if not self.listed:
            return self
        try:
            return Address.parse(Path(self.listed).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidValue("the engine has no address yet", "address") from None

    def publish(self, current: Address) -> None:
        """Write the address of a listed engine; readers see the old or the new one, never half of it."""
        write_whole(Path(self.listed), str(current).encode())

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

    async def connect(self, factory: Factory) -> None:
        """Connect. Raises InvalidValue with the reason."""
        loop, at = asyncio.get_running_loop(), self.current()
        try:
            if at.path:
                await loop.create_unix_connection(factory, at.path)
            else:
                async with asyncio.timeout(CONNECTING):
                    await loop.create_connection(factory, at.host, at.port)
        except OSError as error:  # a TimeoutError too
            raise InvalidValue(f"no engine answers at {at} ({error.strerror or error})", "address") from error


class Place(NamedTuple):
    """Where an engine listens, the key that fronts need, and what messages call it."""

    address: Address
    key: bytes
    name: str = "the engine process"
