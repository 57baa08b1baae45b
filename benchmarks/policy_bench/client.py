"""The benchmark clients. They run in a separate process, without jax, so as not to compete with the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxserve.bench.client import Target, open_sender
from jaxserve.bench.drive import Run, drive
from jaxserve.bench.load import Call


class Tiered(Target):
    """A target whose requests name a tier; the server defines the tier's objectives."""

    def extra(self, call: Call) -> dict[str, Any]:
        return {"ignore_eos": True, "service_tier": call.slo.name}


def send(url: str, model: str, calls: Sequence[Call], tiers: bool) -> Run:
    """Send every call at its time over HTTP, streamed."""
    target = (Tiered if tiers else Target)(url, model)

    async def sent() -> Run:
        async with open_sender(target) as sender:
            return await drive(calls, sender)

    return asyncio.run(sent())
