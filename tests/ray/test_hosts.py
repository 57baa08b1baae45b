"""An instance whose mesh spans two Ray nodes: one device each, and the tokens of one node."""

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

BACK = 180.0  # seconds


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each."""
    import ray
    from ray.cluster_utils import Cluster

    from jaxserve.ray.cluster import OBJECTS, own_options

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **own_options()})
    made.add_node(num_cpus=1, object_store_memory=OBJECTS)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def expected(prompt: range, params: SamplingParams, small: dict[str, Any]) -> list[int]:
    """Return the tokens of an engine with one device, in this process."""
    from jaxserve.engine.engine import Engine

    engine, told = Engine.start(ServeConfig.load(None, **small)), Told()
    try:

        async def work() -> None:
            loop = asyncio.get_running_loop()
            engine.submit(NewRequest(prompt, params, SLO()), lambda delta: loop.call_soon_threadsafe(told, delta))
            await told.ended.wait()

        asyncio.run(work())
    finally:
        engine.close()
    return told.tokens


def test_a_mesh_over_two_nodes_serves_and_comes_back(two_nodes: Any, small: dict[str, Any]) -> None:
    from jaxserve.fleet.replicas import Replicas
    from jaxserve.ray.engines import RayEngines

    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    whole = expected(range(20, 60), params, small)
    engines = RayEngines(ServeConfig.load(None, **{**small, "mesh": "1x2"}))
    assert [one._shares for one in engines.replicas] == [(1, 1)]

    async def tokens(replicas: Replicas) -> list[int]:
        told = Told()
        replicas.submit(NewRequest(tuple(range(20, 60)), params, SLO()), told)
        await told.ended.wait()
        return told.tokens

    async def work() -> None:
        async with asyncio.timeout(BACK):
            replicas = await Replicas.connect(engines.places)
            (found,) = replicas.info.instances
            assert len(found.devices) == 2
            assert await tokens(replicas) == whole
            os.kill(engines.replicas[0]._pids[1], signal.SIGKILL)  # a follower: the whole instance starts again
            while replicas.healthy:
                await asyncio.sleep(0.05)
            while not replicas.healthy:
                await asyncio.sleep(0.05)
            assert await tokens(replicas) == whole
            replicas.close()

    try:
        engines.wait()
        asyncio.run(work())
    finally:
        engines.close()
