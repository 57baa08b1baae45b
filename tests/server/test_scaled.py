"""Replicas that join and leave amid requests: none is lost, and none goes to a replica that has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.fleet.board import Board, Scale, ScaleState
from jaxserve.fleet.replicas import Replicas
from jaxserve.fleet.rolling import Rolling
from jaxserve.fleet.scaler import ReplicaScaler
from jaxserve.fleet.supervisor import Engines
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.scaling.changes import Standing
from jaxserve.server.admin import present_replicas, scale_replicas
from jaxserve.server.openai import ScaleBody
from jaxserve.wire.address import Address, Place
from tests.support.examples import examples
from tests.support.server.fronts import KEY, Way, eventually, front
from tests.support.server.live import at_rest
from tests.support.server.told import Told

MOST = 3
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=5)
STEPS = st.lists(st.tuples(st.integers(0, MOST - 1), st.sampled_from([0.0, 5.0])), min_size=1, max_size=6)


@pytest.fixture
def ways(engine: Any, tmp_path: Path) -> Iterator[list[Way]]:
    made = [Way(engine, Place(Address(path=str(tmp_path / f"s{at}")), KEY, f"replica {at}")) for at in range(MOST)]
    yield made
    at_rest(engine)
    engine.check()


def run(work: Callable[[Replicas], Awaitable[None]], ways: list[Way]) -> None:
    front(work, [one.place for one in ways], partly=True)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_no_request_is_lost_and_none_goes_where_none_is(
    ways: list[Way], monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, float]]
) -> None:
    """At each step a replica joins, or leaves with or without patience for its requests; one always stays."""
    monkeypatch.setattr("jaxserve.fleet.members.RETRY", 0.01)
    ways[0].start()

    async def work(replicas: Replicas) -> None:
        told, over = list[Told](), asyncio.Event()

        async def users() -> None:
            while not over.is_set():
                told.append(Told())
                id = replicas.submit(NewRequest(list(range(20, 50)), PARAMS, SLO()), told[-1])
                sent = replicas.requests[id].engine
                assert sent in replicas.engines.values() and not sent.leaving and not sent.lost
                await asyncio.sleep(0.02)

        sending = asyncio.ensure_future(users())
        await asyncio.sleep(0.02)
        for at, patience in steps:
            if ways[at].server is None:
                await asyncio.to_thread(ways[at].start)
                await eventually(lambda at=at: at in replicas.engines)  # type: ignore[misc]
            elif sum(one.server is not None for one in ways) > 1:
                replicas.engines[at].restart(patience)
                await asyncio.to_thread(ways[at]._ended.wait)
                await asyncio.to_thread(ways[at].stop)
                await eventually(lambda at=at: at not in replicas.engines)  # type: ignore[misc]
            names = {one.name.partition("/")[0] for one in replicas.stats().instances}
            assert names == {str(at) for at in replicas.engines} and len(replicas.info.instances) == len(
                replicas.stats().instances
            )
        over.set()
        await sending
        await asyncio.gather(*(one.ended.wait() for one in told))
        assert {one.deltas[-1].finish_reason for one in told} == {"length"}
        assert len({tuple(one.tokens) for one in told}) == 1

    run(work, ways)
    for one in ways:
        one.stop()


def test_the_scaler_starts_and_drains_by_hand_and_by_load(ways: list[Way], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.fleet.members.RETRY", 0.01)
    config = ServeConfig(replicas=1, max_replicas=MOST, downscale_delay=0.0, scaling="requests:target=1")
    engines = Engines(1)
    engines._keep(ways)
    engines.wait()
    scaler = ReplicaScaler(engines, config, period=0.02)
    scaler.start()

    async def work(replicas: Replicas) -> None:
        rolling = Rolling(replicas)
        assert replicas.board is not None

        def shown() -> Any:
            return present_replicas(rolling)["scaling"]

        def settled(count: int) -> bool:
            state = shown()
            return bool(state["wanted"] == count == state["standing"].count("ready") == len(replicas.engines))

        scale_replicas(rolling, ScaleBody(replicas=2))
        await eventually(lambda: settled(2))
        assert shown()["fixed"] == 2 and [one["replica"] for one in present_replicas(rolling)["replicas"]] == [0, 1]
        scale_replicas(rolling, ScaleBody(replicas=None))
        await eventually(lambda: settled(1))
        await eventually(lambda: shown()["standing"] == ("ready", "stopped", "stopped"))
        assert shown()["fixed"] is None
        told = [Told() for _ in range(12)]
        long = SamplingParams(max_tokens=150, ignore_eos=True)
        for one in told:
            replicas.submit(NewRequest(list(range(20, 50)), long, SLO()), one)
        await eventually(lambda: shown()["wanted"] == MOST)
        await asyncio.gather(*(one.ended.wait() for one in told))
        await eventually(lambda: settled(1))
        assert {len(one.tokens) for one in told} == {150}
        for count in (0, MOST + 1):
            with pytest.raises(InvalidValue, match=rf"replicas={count} must be 1 \(min_replicas\) to {MOST}"):
                scale_replicas(rolling, ScaleBody(replicas=count))

    run(work, ways)
    scaler.close()
    assert engines.close()


def test_a_draining_engine_serves_on(ways: list[Way]) -> None:
    """With `stay`, requests that run keep their engine, and new ones come again."""
    for one in ways[:2]:
        one.start()

    async def work(replicas: Replicas) -> None:
        told = Told()
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        replicas.submit(NewRequest(list(range(20, 50)), long, SLO()), told)
        ((one, engine),) = [(at, one) for at, one in replicas.engines.items() if one._listeners]
        await told.begun.wait()
        engine.restart(30.0)
        await eventually(lambda: engine.leaving and not engine.healthy)
        assert replicas.stats().replicas_draining == 1 and replicas.healthy
        engine.stay()
        await eventually(lambda: engine.healthy)
        await told.ended.wait()
        assert len(told.tokens) == 100 and not ways[one]._ended.is_set()

    run(work, ways)
    for way in ways:
        way.stop()


def test_the_board(tmp_path: Path) -> None:
    board = Board(tmp_path)
    assert board.state() is None and board.asked() is None
    state = ScaleState(1, 4, 2, None, tuple(one.value for one in Standing), 3.5, "no device is left")
    board.publish(state)
    for count in (3, None):
        board.ask(Scale(count))
        assert board.state() == state and board.asked() == Scale(count) and board.asked() is None
