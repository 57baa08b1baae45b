"""Several engines used as one: whichever of them is lost, every request ends with the tokens that it would have had."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InvalidValue
from jaxserve.fleet.engine_server import EngineServer
from jaxserve.fleet.remote_engine import RemoteEngine
from jaxserve.fleet.replicas import Replicas
from jaxserve.generation.vectors import vector_of
from jaxserve.sched.api.errors import Unavailable
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.slo import SLO
from tests.support.server.fronts import KEY, STYLES, among
from tests.support.server.live import at_rest
from tests.support.server.told import Told

PROMPT = list(range(20, 50))


Work = Callable[[Replicas, list[EngineServer]], Awaitable[None]]


@pytest.fixture
def several(engine: Any, tmp_path: Path) -> Callable[[Work], None]:
    """Run a coroutine function with three replicas, which are three ways to the session's engine."""

    def run(work: Work) -> None:
        servers = [EngineServer(engine, KEY) for _ in range(3)]
        among(servers, tmp_path, lambda replicas: work(replicas, servers))
        at_rest(engine)
        engine.check()

    return run


def asked(styles: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=24, ignore_eos=True, **STYLES[at % len(STYLES)]) for at in range(styles)]


async def all_of(replicas: Replicas, params: list[SamplingParams]) -> list[Told]:
    """Submit requests, and return them once all have begun."""
    told = [Told() for _ in params]
    for at, (one, how) in enumerate(zip(told, params, strict=True)):
        replicas.submit(NewRequest([*PROMPT, at], how, SLO()), one)
    await asyncio.gather(*(one.begun.wait() for one in told))
    return told


def test_a_lost_engine_changes_no_token(several: Any) -> None:
    """Engines are lost one after the other; every stream continues, down to the last engine."""

    async def work(replicas: Replicas, servers: list[EngineServer]) -> None:
        calm = await all_of(replicas, asked(8))
        await asyncio.gather(*(one.ended.wait() for one in calm))
        told, continued = await all_of(replicas, asked(8)), list[None]()
        replicas.on_continued = lambda: continued.append(None)
        for server in servers[:2]:
            await asyncio.to_thread(server.close)  # every front loses its connection
            await asyncio.sleep(0.02)
        await asyncio.gather(*(one.ended.wait() for one in told))
        for one, whole in zip(told, calm, strict=True):
            assert one.tokens == whole.tokens and len(one.tokens) == 24
            assert one.scores == whole.scores and one.deltas[-1].finish_reason == "length"
        assert continued and replicas.healthy and replicas.stats().replicas == 1

    several(work)


def test_a_lost_engine_changes_no_vector(several: Any) -> None:
    """Prompts of a lost engine are computed again, from their beginning, on another one."""

    def submitted(replicas: Replicas) -> list[Told]:
        told = [Told() for _ in range(12)]
        for at, one in enumerate(told):
            prompt, how = [at + 1, *range(20, 240)], SamplingParams(max_tokens=1, pooling=("last", "mean")[at % 2])
            replicas.submit(NewRequest(prompt, how, SLO(), salt=bytes([at])), one)
        return told

    async def work(replicas: Replicas, servers: list[EngineServer]) -> None:
        calm = submitted(replicas)
        await asyncio.gather(*(one.ended.wait() for one in calm))
        told, continued = submitted(replicas), list[None]()
        replicas.on_continued = lambda: continued.append(None)
        await asyncio.to_thread(servers[0].close)
        await asyncio.gather(*(one.ended.wait() for one in told))
        for one, whole in zip(told, calm, strict=True):
            assert one.deltas[-1].finish_reason in ("stop", "length") and not one.tokens
            vector, expected = (vector_of(each.deltas[-1].pooled) for each in (one, whole))
            np.testing.assert_allclose(vector, expected, atol=1e-4)
            assert len(vector) == replicas.info.hidden_size
        assert continued

    several(work)


def test_without_any_engine_requests_end_with_an_error(several: Any) -> None:
    async def work(replicas: Replicas, servers: list[EngineServer]) -> None:
        told = await all_of(replicas, [SamplingParams(max_tokens=200, ignore_eos=True)] * 3)
        for server in servers:
            await asyncio.to_thread(server.close)
        await asyncio.gather(*(one.ended.wait() for one in told))
        assert {one.deltas[-1].finish_reason for one in told} == {"unavailable"}
        with pytest.raises(Unavailable, match="has ended"):
            replicas.submit(NewRequest(PROMPT, SamplingParams(), SLO()), Told())
        assert not replicas.healthy

    several(work)


def test_a_request_that_was_cancelled_does_not_continue(several: Any) -> None:
    async def work(replicas: Replicas, servers: list[EngineServer]) -> None:
        one, continued = Told(), list[None]()
        replicas.on_continued = lambda: continued.append(None)
        id = replicas.submit(NewRequest(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), SLO()), one)
        await one.begun.wait()
        replicas.cancel(id, "stop")
        replicas.requests[id].engine._connection.close("killed")
        await one.ended.wait()
        assert one.deltas[-1].finish_reason == "stop" and not continued

    several(work)


def test_requests_are_spread_and_a_draining_replica_gets_none(several: Any) -> None:
    async def work(replicas: Replicas, servers: list[EngineServer]) -> None:
        params = [SamplingParams(max_tokens=4, ignore_eos=True)] * 6
        told = [Told() for _ in params]
        ids = [replicas.submit(NewRequest(PROMPT, how, SLO()), one) for one, how in zip(told, params, strict=True)]
        sent = replicas.requests
        assert Counter(sent[id].engine for id in ids) == dict.fromkeys(replicas.engines.values(), 2)
        replicas.members.drain(1)
        more = [replicas.submit(NewRequest(PROMPT, params[0], SLO()), Told()) for _ in range(4)]
        assert {sent[id].engine for id in more} == {replicas.engines[0], replicas.engines[2]}
        await asyncio.gather(*(one.ended.wait() for one in told))

    several(work)


def test_roles_totals_and_caches(several: Any) -> None:
    async def work(replicas: Replicas, servers: list[EngineServer]) -> None:
        assert len(replicas.info.instances) == len(replicas.roles) == 6
        assert [one.name for one in replicas.info.instances][::2] == [f"{at}/{'prefill-0'}" for at in range(3)]
        await replicas.refresh()
        one = replicas.engines[0].stats()
        assert replicas.stats().counters.steps == 3 * one.counters.steps
        assert replicas.stats().finished == {reason: 3 * count for reason, count in one.finished.items()}
        with pytest.raises(InvalidValue, match="instance=6 must be 0 to 5"):
            await asyncio.to_thread(replicas.set_roles, {6: Role.MIXED})
        before = replicas.roles
        await asyncio.to_thread(replicas.set_roles, {4: Role.MIXED, 5: Role.MIXED})
        await replicas.refresh()
        assert set(replicas.roles) == {Role.MIXED}  # of the one engine behind all three
        await asyncio.to_thread(replicas.set_roles, dict(enumerate(before)))
        assert await asyncio.to_thread(replicas.reset_prefix_cache)
        assert not await asyncio.to_thread(replicas.end_session, "unknown")

    several(work)


@pytest.mark.parametrize("seed", range(2))
def test_random_losses_change_no_token(several: Any, seed: int) -> None:
    """Connections break at random times, and the engines come back."""

    async def work(replicas: Replicas, servers: list[EngineServer]) -> None:
        calm = await all_of(replicas, asked(8))
        await asyncio.gather(*(one.ended.wait() for one in calm))
        draw, running = random.Random(seed), asyncio.ensure_future(all_of(replicas, asked(8)))
        addresses = [server.address for server in servers]
        for _ in range(4):
            await asyncio.sleep(draw.random() * 0.05)
            at = draw.randrange(3)
            replicas.engines[at]._connection.close("killed")
            await asyncio.sleep(0)
            replicas.members.join(at, await RemoteEngine.connect(addresses[at], KEY))
        told = await running
        await asyncio.gather(*(one.ended.wait() for one in told))
        assert [one.tokens for one in told] == [one.tokens for one in calm]
        assert [one.scores for one in told] == [one.scores for one in calm]

    several(work)
