"""Engines in a Ray cluster: a killed one changes no token, and replicas start again without a lost request."""

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

PARAMS = SamplingParams(max_tokens=120, ignore_eos=True, temperature=1.0, seed=5)
BACK = 120.0  # seconds


@pytest.fixture(scope="module")
def engines(cluster: Any, small: dict[str, Any]) -> Iterator[Any]:
    from jaxserve.ray.engines import RayEngines

    made = RayEngines(ServeConfig.load(None, **small, replicas=2))
    made.wait()
    yield made
    assert made.close()


def connected(engines: Any, work: Any) -> None:
    from jaxserve.fleet.replicas import Replicas

    async def limited() -> None:
        async with asyncio.timeout(2 * BACK):
            replicas = await Replicas.connect(engines.places)
            try:
                await work(replicas)
            finally:
                replicas.close()

    asyncio.run(limited())


async def calm(replicas: Any) -> list[int]:
    told = Told()
    replicas.submit(NewRequest(tuple(range(20, 50)), PARAMS, SLO()), told)
    await told.ended.wait()
    assert len(told.tokens) == 120
    return told.tokens


async def ready(replicas: Any) -> None:
    """Wait until both replicas take requests."""
    while any(ailment for _, ailment, _ in replicas.members.standing()):
        await asyncio.sleep(0.05)


def test_an_engine_gets_its_share_of_the_cores(engines: Any) -> None:
    pids = [pid for one in engines.replicas for pid in one._pids]
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [0] * len(pids) and pids


def test_a_killed_engine_changes_no_token(engines: Any) -> None:
    async def work(replicas: Any) -> None:
        whole, before = await calm(replicas), str(engines.places[0].address)
        told, continued = [Told() for _ in range(8)], list[None]()
        replicas.on_continued = lambda: continued.append(None)
        for one in told:
            replicas.submit(NewRequest(tuple(range(20, 50)), PARAMS, SLO()), one)
        await asyncio.gather(*(one.begun.wait() for one in told))
        os.kill(engines.replicas[0]._pids[0], signal.SIGKILL)
        await asyncio.gather(*(one.ended.wait() for one in told))
        assert all(one.tokens == whole for one in told) and continued
        await ready(replicas)
        assert str(engines.places[0].address) != before  # and yet it is found
        assert await calm(replicas) == whole

    connected(engines, work)


def test_replicas_start_again_without_a_lost_request(engines: Any) -> None:
    from jaxserve.fleet.rolling import Rolling

    async def work(replicas: Any) -> None:
        whole, before, told = await calm(replicas), [one._pids for one in engines.replicas], list[Told]()
        rolling = Rolling(replicas)
        rolling.start(30.0)
        while rolling.running:
            told.append(Told())
            replicas.submit(NewRequest(tuple(range(20, 50)), PARAMS, SLO()), told[-1])
            await asyncio.sleep(0.2)
        await asyncio.gather(*(one.ended.wait() for one in told))
        assert all(one.tokens == whole for one in told) and len(told) > 5
        after = [one._pids for one in engines.replicas]
        assert all(old != new for old, new in zip(before, after, strict=True))

    connected(engines, work)
