"""Tests in an event loop of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")
SECONDS = 60.0  # more than any of these tests needs


class Closing:
    """An argument of a test that is closed with the loop of the test."""

    async def close(self) -> None: ...


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test in a loop of its own, and close those of its arguments that are `Closing`."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def limited() -> None:
            try:
                async with asyncio.timeout(SECONDS):
                    await test(*args, **kwargs)
            finally:
                for one in kwargs.values():
                    if isinstance(one, Closing):
                        await one.close()

        asyncio.run(limited())

    return run
