"""Replicas start again one after the other: no request is lost and no token changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.fleet.replicas import Replicas
from jaxserve.fleet.rolling import Rolling
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from jaxserve.server.admin import present_replicas, restart_replicas
from jaxserve.server.failures import Refused
from jaxserve.server.openai import RestartBody
from jaxserve.wire.address import Address, Place
from tests.support.server.fronts import KEY, Way, eventually, front
from tests.support.server.live import at_rest
from tests.support.server.told import Told

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5)
Work = Callable[[Replicas], Awaitable[None]]


class Restarting(Way):
    """A way to the session's engine that closes when asked to, and opens again a moment later."""

    restarts = 0

    def start(self, closing: Callable[[], bool] = lambda: False) -> None:
        super().start()
        self.server.on_retired = threading.Thread(target=self._again).start

    def _again(self) -> None:
        self.stop()
        time.sleep(0.1)
        self.start()
        self.restarts += 1


@pytest.fixture
def pair(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Restarting]]:
    """Two replicas, which are two ways to the session's engine."""
    monkeypatch.setattr("jaxserve.fleet.rolling.SETTLING", 0.1)  # there is one front
    places = [Place(Address(path=str(tmp_path / f"socket{at}")), KEY, f"replica {at}") for at in range(2)]
    made = [Restarting(engine, place) for place in places]
    for one in made:
        one.start()
    yield made
    at_rest(engine)
    engine.check()
    for one in made:
        one.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fronts find a replica that is back at once."""
    monkeypatch.setattr("jaxserve.fleet.members.RETRY", 0.01)


def run(work: Work, pair: list[Restarting]) -> None:
    front(work, [one.place for one in pair])


async def streams(replicas: Replicas, rolling: Rolling) -> list[Told]:
    """Send requests as long as replicas restart, and return all of them at their end."""
    told: list[Told] = []
    while rolling.running or not told:
        told.append(Told())
        replicas.submit(NewRequest(list(range(20, 50)), PARAMS, SLO()), told[-1])
        assert sum(ailment is None for _, ailment, _ in replicas.members.standing()) >= 1, "both replicas are out"
        await asyncio.sleep(0.02)
    await asyncio.gather(*(one.ended.wait() for one in told))
    return told


@pytest.mark.parametrize("patience", [30.0, 0.0])
def test_no_request_is_lost_and_no_token_changes(pair: list[Restarting], patience: float) -> None:
    """With patience requests finish where they are; without, they continue elsewhere."""

    async def work(replicas: Replicas) -> None:
        calm, continued, rolling = Told(), list[None](), Rolling(replicas)
        replicas.on_continued = lambda: continued.append(None)
        replicas.submit(NewRequest(list(range(20, 50)), PARAMS, SLO()), calm)
        await calm.ended.wait()
        rolling.start(patience)
        told = await streams(replicas, rolling)
        assert {tuple(one.tokens) for one in told} == {tuple(calm.tokens)} and len(told) > 20
        assert {one.deltas[-1].finish_reason for one in told} == {"length"}
        assert [one.restarts for one in pair] == [1, 1] and rolling.restarted == 2
        assert bool(continued) <= (not patience)
        assert all(ailment is None for _, ailment, _ in replicas.members.standing())

    run(work, pair)


@pytest.mark.usefixtures("quick")
def test_a_replica_waits_for_the_others(pair: list[Restarting]) -> None:
    """One that is lost must be back before another one drains."""

    async def work(replicas: Replicas) -> None:
        await asyncio.to_thread(pair[1].stop)
        await asyncio.sleep(0.05)
        rolling = Rolling(replicas)
        rolling.start(1.0)
        await asyncio.sleep(0.2)  # twenty attempts to connect
        assert replicas.healthy and pair[0].restarts == 0
        await asyncio.to_thread(pair[1].start)
        await eventually(lambda: not rolling.running)
        assert [one.restarts for one in pair] == [1, 1]

    run(work, pair)


@pytest.mark.usefixtures("quick")
def test_one_front_restarts_at_a_time(pair: list[Restarting]) -> None:
    async def work(replicas: Replicas) -> None:
        other = await Replicas.connect([one.place for one in pair])
        first, second = Rolling(replicas), Rolling(other)
        first.start(0.0)
        with pytest.raises(JaxserveError, match="a restart is in progress at another front"):
            second.start(0.0)
        assert first.running and not second.running
        await eventually(lambda: not first.running)
        second.start(0.0)
        await eventually(lambda: not second.running)
        assert [one.restarts for one in pair] == [2, 2]
        other.close()

    run(work, pair)


@pytest.mark.usefixtures("quick")
def test_what_is_refused(pair: list[Restarting]) -> None:
    async def work(replicas: Replicas) -> None:
        rolling = Rolling(replicas)
        with pytest.raises(InvalidValue, match=r"drain_timeout=-1\.0 must be 0 to"):
            restart_replicas(rolling, RestartBody(drain_timeout=-1.0), 30.0)
        assert present_replicas(rolling)["replicas"][0]["ready"]
        restart_replicas(rolling, RestartBody(), 0.0)
        with pytest.raises(Refused, match="a restart is in progress: 0 of 2 replicas are done") as found:
            restart_replicas(rolling, RestartBody(), 0.0)
        assert found.value.status == 409
        await eventually(lambda: not rolling.running)
        alone = await Replicas.connect([pair[0].place])
        with pytest.raises(InvalidValue, match="requests would be lost while the only engine starts"):
            Rolling(alone).start(0.0)
        alone.close()

    run(work, pair)
    with pytest.raises(InvalidValue, match="there are no replicas: serve with --replicas 2"):
        restart_replicas(None, RestartBody(), 0.0)
    assert present_replicas(None) == {"object": "replicas", "replicas": [], "restart": None, "scaling": None}
