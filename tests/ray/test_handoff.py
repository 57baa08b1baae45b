"""Prefill and decode replicas in Ray: tokens of one process, pages between actors, and a killed peer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from tests.support.server.told import Told

PARAMS = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0, seed=5)
PROMPT = list(range(20, 120))
LIMIT = 240.0  # seconds


@pytest.fixture(scope="module")
def engines(cluster: Any, small: dict[str, Any]) -> Iterator[Any]:
    from jaxserve.ray.engines import RayEngines

    made = RayEngines(ServeConfig.load(None, **small, prefill_replicas=1, decode_replicas=1))
    made.wait()
    yield made
    assert made.close()


@pytest.fixture(scope="module")
def whole(small: dict[str, Any]) -> list[int]:
    """The tokens of the request by `LLM`, in this process."""
    from jaxserve import LLM

    with LLM(**small) as llm:
        return list(llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids)


def test_tokens_pages_and_a_killed_peer(engines: Any, whole: list[int]) -> None:
    """The decode replica fetches the pages of a prompt; streams of either side that is killed have the same tokens."""
    from jaxserve.fleet.replicas import Replicas

    async def asked(replicas: Any, count: int) -> list[Told]:
        told = [Told() for _ in range(count)]
        for one in told:
            replicas.submit(NewRequest(PROMPT, PARAMS, SLO()), one)
        await asyncio.gather(*(one.begun.wait() for one in told))
        return told

    async def work() -> None:
        replicas = await Replicas.connect(engines.places)
        try:
            (one,) = await asked(replicas, 1)
            await one.ended.wait()
            await replicas.refresh()
            stats = replicas.stats()
            assert one.tokens == whole
            assert [role.value for role in replicas.roles] == ["prefill", "decode"]
            assert stats.kv_fetched_pages + stats.kv_fetch_fallbacks > 0
            assert stats.kv_given_pages >= stats.kv_fetched_pages
            for side in (1, 0):
                told, continued = await asked(replicas, 4), list[None]()
                replicas.on_continued = lambda continued=continued: continued.append(None)
                os.kill(engines.replicas[side]._pids[0], signal.SIGKILL)
                (late,) = await asked(replicas, 1)
                await asyncio.gather(*(one.ended.wait() for one in [*told, late]))
                assert all(one.tokens == whole for one in [*told, late])
                assert bool(continued) or side == 0  # those of the decode replica, where the streams were
                while not all(ailment is None for _, ailment, _ in replicas.members.standing()):
                    await asyncio.sleep(0.05)
        finally:
            replicas.close()

    asyncio.run(asyncio.wait_for(work(), LIMIT))
