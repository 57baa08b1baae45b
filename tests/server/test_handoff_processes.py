"""Prefill and decode replicas in processes of their own: SIGKILL of either side changes no token."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.fleet.processes import EngineProcesses
from jaxserve.fleet.replicas import Replicas
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from tests.support.server.live import SMALL
from tests.support.server.told import Told

pytestmark = pytest.mark.full
STREAMS = 12
MOMENTS = (0.0, 0.02, 0.05, 0.1, 0.2)


async def answers(replicas: Replicas, salt: bytes, *, kill: int | None = None, moment: float = 0.0) -> list[Told]:
    """Ask for all streams. Another salt shares no prefix with earlier rounds."""
    told = [Told() for _ in range(STREAMS)]
    for at, one in enumerate(told):
        prompt = [8 + (7 * at + 3 * place + at * place) % 4000 for place in range(30 + 15 * at)]
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=float(at % 2), seed=at, logprobs=at % 3)
        replicas.submit(NewRequest(prompt, params, SLO(), salt=salt), one)
    if kill is not None:
        await asyncio.sleep(moment)
        os.kill(kill, signal.SIGKILL)
    await asyncio.gather(*(one.ended.wait() for one in told))
    return told


@pytest.mark.parametrize(
    ("transport", "mesh"), [("direct", "1x1"), ("host", "1x1"), ("direct", "1x2"), ("host", "2x1")]
)
def test_sigkill_of_either_side_changes_no_token(transport: Any, mesh: str) -> None:
    settings: dict[str, Any] = {**SMALL, "max_num_queued_reqs": 200, "kv_transfer": transport, "mesh": mesh}
    engines = EngineProcesses(ServeConfig.load(prefill_replicas=1, decode_replicas=1, **settings))
    try:
        engines.wait()
        asyncio.run(asyncio.wait_for(rounds(engines), 300))
    finally:
        assert engines.close()


async def rounds(engines: EngineProcesses) -> None:
    replicas = await Replicas.connect(engines.places)
    calm = await answers(replicas, b"calm")
    await replicas.refresh()
    giver, taker = (one.stats() for one in replicas.engines.values())
    assert taker.kv_fetched_pages == giver.kv_given_pages > 0 and taker.kv_fetch_fallbacks == 0
    for number, moment in enumerate(MOMENTS):
        victim = engines.replicas[number % 2].pid
        told = await answers(replicas, bytes([number]), kill=victim, moment=moment)
        assert [one.tokens for one in told] == [one.tokens for one in calm]
        assert {one.deltas[-1].finish_reason for one in told} == {"length"}
        while replicas.stats().replicas < 2:
            await asyncio.sleep(0.1)
    await replicas.refresh()
    assert sum(one.stats().compilations_after_warmup for one in replicas.engines.values()) == 0
    replicas.close()
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("transport", ["auto", "host"])
def test_plain_replicas_fetch_from_each_other(transport: Any) -> None:
    """Every second round goes to the replica that has computed nothing of it; the death of the other one is no harm."""
    engines = EngineProcesses(ServeConfig.load(replicas=2, kv_transfer=transport, mesh="1x1", **SMALL))
    try:
        engines.wait()
        asyncio.run(asyncio.wait_for(fetching(engines), 200))
    finally:
        assert engines.close()


async def fetching(engines: EngineProcesses) -> None:
    replicas = await Replicas.connect(engines.places)
    for number in range(5):  # the first fetches may come too late, because they connect
        replicas.members.draining = {1}
        calm = await answers(replicas, bytes([number]))
        await asyncio.sleep(0.2)  # reports of the caches
        replicas.members.draining = {0}
        told = await answers(replicas, bytes([number]))
        assert [one.tokens for one in told] == [one.tokens for one in calm]
    await replicas.refresh()
    giver, taker = (one.stats() for one in replicas.engines.values())
    assert 0 < taker.kv_fetched_pages <= giver.kv_given_pages and taker.kv_fetch_fallbacks == 0
    assert taker.prefix_fetch_pages + taker.prefix_fetch_unused <= taker.kv_fetched_pages
    replicas.members.draining = {1}
    await answers(replicas, b"killed")
    await asyncio.sleep(0.2)
    replicas.members.draining = {0}
    told = await answers(replicas, b"killed", kill=engines.replicas[0].pid, moment=0.01)
    assert [one.tokens for one in told] == [one.tokens for one in calm]
    replicas.close()
    await asyncio.sleep(0.05)
