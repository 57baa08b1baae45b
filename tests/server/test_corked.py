"""Writes that are kept until the end of a turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from jaxserve.server.protocol import Corked


class Closed:
    """A transport that has been reset, and raises for a write as uvloop's does."""

    def is_closing(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        raise RuntimeError("the handler is closed")


def test_what_is_kept_for_a_connection_that_was_reset_is_dropped() -> None:
    wrong: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        Corked(cast(asyncio.Transport, Closed()), loop).write(b"token")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not wrong
