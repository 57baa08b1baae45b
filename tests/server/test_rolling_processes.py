"""Replicas in processes of their own start again while streams run: none is lost, and no token changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server.processes import Running, alive, served

pytestmark = pytest.mark.full
ADMIN = {"Authorization": "Bearer boss"}
RESTART = "/v1/admin/replicas/restart"
LIMIT = 300.0  # seconds
STREAMS = 6  # at a time


def body(number: int) -> dict[str, Any]:
    """Return one of four requests: two greedy ones, and two sampled with seeds."""
    return {
        "prompt": [8 + (7 * number + 3 * place) % 4000 for place in range(20 + number % 4)],
        "max_tokens": 100,
        "temperature": float(number % 2),
        "seed": number % 4,
        "ignore_eos": True,
        "logprobs": 0,  # names each token, also those without text
        "stream": True,
    }


async def stream(client: httpx.AsyncClient, number: int) -> list[str]:
    """Return the tokens of a stream that ends as it should."""
    tokens, reason = list[str](), None
    async with client.stream("POST", "/v1/completions", json=body(number % 4)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                (choice,) = event["choices"]
                tokens += (choice["logprobs"] or {"tokens": ()})["tokens"]
                reason = choice["finish_reason"] or reason
    assert reason == "length" and len(tokens) == 100
    return tokens


async def restarting(admin: httpx.AsyncClient) -> bool:
    """Return whether the front of this connection restarts replicas."""
    return bool((await admin.get("/v1/admin/replicas")).json()["restart"]["running"])


@asynccontextmanager
async def connections(server: Running) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Return one connection to each front."""
    found, spare = dict[int, httpx.AsyncClient](), list[httpx.AsyncClient]()
    while len(found) < max(1, len(server.fronts)):
        client = httpx.AsyncClient(base_url=server.url, headers=ADMIN, timeout=LIMIT)
        spare.append(client)
        async with client.stream("GET", "/health") as response:
            port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            found.setdefault(server.owners().get(port, server.process.pid), client)
            await response.aread()
    try:
        yield list(found.values())
    finally:
        for client in spare:
            await client.aclose()


async def restarted(server: Running, patience: float) -> list[int]:
    """Restart all replicas amid streams, asking all fronts at the same time, and return the statuses."""
    async with connections(server) as fronts, httpx.AsyncClient(base_url=server.url, timeout=LIMIT) as client:
        calm = await asyncio.gather(*(stream(client, number) for number in range(4)))
        asked = await asyncio.gather(*(one.post(RESTART, json={"drain_timeout": patience}) for one in fronts))
        over, count = asyncio.Event(), 0

        async def users(first: int) -> None:
            nonlocal count
            number = first
            while not over.is_set():
                assert await stream(client, number) == calm[number % 4]
                number, count = number + 1, count + 1

        running = [asyncio.ensure_future(users(number)) for number in range(STREAMS)]
        while any([await restarting(one) for one in fronts]):
            await asyncio.sleep(0.2)
        over.set()
        await asyncio.gather(*running)
        assert count > 3 * STREAMS
        replicas = (await fronts[0].get("/v1/admin/replicas")).json()["replicas"]
        assert [one["ready"] for one in replicas] == [True, True]
    return [one.status_code for one in asked]


@pytest.mark.parametrize(("fronts", "patience"), [(1, 30.0), (1, 0.0), (2, 30.0), (2, 0.0)])
def test_no_stream_is_lost(fronts: int, patience: float, tmp_path: Path) -> None:
    """With patience streams finish where they are; without, they continue on the other replica."""
    log = tmp_path / "log"
    with served(f"--api-server-count {fronts} --admin-key boss", log, replicas=2) as server:
        statuses = asyncio.run(asyncio.wait_for(restarted(server, patience), LIMIT))
        assert not any(map(alive, server.engines))
        assert sorted(statuses) == [202, 409][:fronts]
        assert log.read_text().count("starts again, as asked") == 2
