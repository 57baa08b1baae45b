"""The clients, in a process of their own: it does not import jax, and its work is not the engine's thread's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxserve.bench.client import Target, open_sender
from jaxserve.bench.drive import Run, drive
from jaxserve.bench.load import Call


class Tiered(Target):
    """Requests name their tier; what it promises is the server's."""

    def extra(self, call: Call) -> dict[str, Any]:
        return {"ignore_eos": True, "service_tier": call.slo.name}


def send(url: str, model: str, calls: Sequence[Call], tiers: bool) -> Run:
    """Every call at its time, as a stream over HTTP."""
    target = (Tiered if tiers else Target)(url, model)

    async def sent() -> Run:
        async with open_sender("http", target) as sender:
            return await drive(calls, sender)

    return asyncio.run(sent())
