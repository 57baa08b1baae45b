"""A front of replicas that runs for the length of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jaxserve.remote.address import Place
from jaxserve.remote.replicas import Replicas


def front(work: Callable[[Replicas], Awaitable[None]], places: Sequence[Place], *, partly: bool = False) -> None:
    """Run `work` on a front of the engines at `places`, for at most a minute. partly: some may be missing."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            replicas = await Replicas.connect(places, partly=partly)
            try:
                await work(replicas)
            finally:
                replicas.close()
                await asyncio.sleep(0.01)

    asyncio.run(limited())
