"""Replicas in processes of their own start and stop while streams run, and all fronts learn of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server.processes import children, served

pytestmark = pytest.mark.full
ADMIN = {"Authorization": "Bearer boss"}
LIMIT = 240.0  # seconds
BODY = {"prompt": [9] * 40, "max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}


async def state(url: str) -> dict[str, Any]:
    """Return what any front says, over a new connection."""
    async with httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=LIMIT) as client:
        found: dict[str, Any] = (await client.get("/v1/admin/replicas")).json()
        return found


async def scaled(url: str) -> None:
    over, texts = asyncio.Event(), list[str]()

    async def users() -> None:
        while not over.is_set():
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as client:
                answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])

    async def settled(count: int) -> None:
        """Wait until several connections, to whichever front, show so many ready replicas."""
        while not all(
            sum(one["ready"] for one in found["replicas"]) == count == found["scaling"]["standing"].count("ready")
            for found in [await state(url) for _ in range(6)]
        ):
            await asyncio.sleep(0.2)

    running = [asyncio.ensure_future(users()) for _ in range(3)]
    async with httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=LIMIT) as client:
        for count in (2, 1):
            assert (await client.post("/v1/admin/replicas/scale", json={"replicas": count})).status_code == 202
            await settled(count)
        refused = await client.post("/v1/admin/replicas/scale", json={"replicas": 3})
        assert refused.status_code == 400 and "replicas=3 must be 1 (min_replicas) to 2" in refused.text
    over.set()
    await asyncio.gather(*running)
    assert len(texts) > 6 and len(set(texts)) == 1


@pytest.mark.parametrize("fronts", [1, 2])
def test_no_request_is_lost(fronts: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = f"--max-replicas 2 --api-server-count {fronts} --admin-key boss --downscale-delay 0s"
    with served(flags, log) as server:
        asyncio.run(asyncio.wait_for(scaled(server.url), LIMIT))
        text = log.read_text()
        assert "replica 1 serves after" in text and " has stopped" in text  # the one with the fewest requests
        assert len(children(server.process.pid)) == (1 if fronts == 1 else 1 + fronts)
