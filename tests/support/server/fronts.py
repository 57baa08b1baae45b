"""A front of replicas that runs for the length of a test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxserve.fleet.engine_server import EngineServer
from jaxserve.fleet.remote_engine import RemoteEngine
from jaxserve.fleet.replicas import Replicas
from jaxserve.wire.address import Address, Place
from tests.support.timing import PATIENCE

KEY = b"key"
# Parameters of requests in which replicas could differ.
STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "seed": 12, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2, "prompt_logprobs": 1},
)


def among(servers: Sequence[EngineServer], folder: Path, work: Callable[[Replicas], Awaitable[None]]) -> None:
    """Run `work` on a front of these servers, which start and end with it. What is lost is not joined again."""

    async def limited() -> None:
        async with asyncio.timeout(PATIENCE):
            replicas = Replicas([await RemoteEngine.connect(one, KEY, f"replica {one}") for one in addresses])
            try:
                await work(replicas)
            finally:
                replicas.close()
                await asyncio.sleep(0.01)

    with ExitStack() as ending:
        addresses = [server.start(Address(path=str(folder / f"s{at}"))) for at, server in enumerate(servers)]
        for server in servers:
            ending.callback(server.close)
        asyncio.run(limited())


def front(work: Callable[[Replicas], Awaitable[None]], places: Sequence[Place], *, partly: bool = False) -> None:
    """Run `work` on a front of the engines at `places`. partly: some may be missing."""

    async def limited() -> None:
        async with asyncio.timeout(PATIENCE):
            replicas = await Replicas.connect(places, partly=partly)
            try:
                await work(replicas)
            finally:
                replicas.close()
                await asyncio.sleep(0.01)

    asyncio.run(limited())


async def eventually(reached: Callable[[], object]) -> None:
    """Wait until a condition holds, for as long as the front that a test runs in."""
    while not reached():
        await asyncio.sleep(0.005)


class Way:
    """A Replica that is a way to the session's engine, and notes requests that come after it should have left."""

    def __init__(self, engine: Any, place: Place) -> None:
        self._engine, self.place = engine, place
        self._ended = threading.Event()
        self.server: EngineServer | None = None

    def start(self, closing: Callable[[], bool] = lambda: False) -> None:
        self._ended.clear()
        self.server = EngineServer(self._engine, KEY)
        self.server.on_retired = self._ended.set
        self.server.start(self.place.address)

    def ended(self, closing: Callable[[], bool]) -> str | None:
        while not self._ended.wait(0.01):
            if closing():
                return None
        return ""

    def stop(self, *, keep: bool = False) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
        self.place.address.vacate()

    def close(self) -> bool:
        self.stop()
        return True
