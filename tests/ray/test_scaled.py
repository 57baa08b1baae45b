"""Engines in Ray that start and stop: devices are taken and given back, and a lack of them is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.fleet.board import Scale
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from tests.support.server.told import Told
from tests.support.timing import until

PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=5)
LIMIT = 120.0  # seconds


def test_engines_start_and_stop(cluster: Any, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    from jaxserve.fleet.replicas import Replicas
    from jaxserve.fleet.scaler import ReplicaScaler
    from jaxserve.ray.engines import RayEngines

    monkeypatch.setattr("jaxserve.ray.replica.PLACING", 1.0)
    config = ServeConfig.load(None, **small, replicas=1, max_replicas=2, downscale_delay=0.0)
    engines = RayEngines(config)
    engines.wait()
    scaler = ReplicaScaler(engines, config, period=0.2)
    scaler.start()
    board = scaler.board

    def standing() -> tuple[str, ...]:
        state = board.state()
        assert state is not None
        return state.standing

    async def streams(patience: Callable[[], bool]) -> None:
        replicas = await Replicas.connect(engines.places, partly=True)
        told = list[Told]()
        while not patience() or len(told) < 8:
            told.append(Told())
            replicas.submit(NewRequest(tuple(range(20, 50)), PARAMS, SLO()), told[-1])
            await asyncio.sleep(0.1)
        await asyncio.gather(*(one.ended.wait() for one in told))
        assert len({tuple(one.tokens) for one in told}) == 1 and len(told[0].tokens) == 60
        replicas.close()

    other = placement_group([{"CPU": 3}])
    assert other.wait(30)
    board.ask(Scale(2))
    until(lambda: "1 CPU and 0 are free" in str((state := board.state()) and state.failure))
    assert standing() == ("ready", "starting")
    remove_placement_group(other)
    asyncio.run(asyncio.wait_for(streams(lambda: standing() == ("ready", "ready")), LIMIT))
    board.ask(Scale(1))
    asyncio.run(asyncio.wait_for(streams(lambda: standing().count("stopped") == 1), LIMIT))
    until(lambda: cluster.available_resources().get("CPU") == 3)
    scaler.close()
    assert engines.close()
