"""An engine in another process: the same tokens, and nothing left behind by whichever end goes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidValue, JaxserveError, QueueFull
from jaxserve.fleet import remote_engine as under_test
from jaxserve.fleet.engine_server import EngineServer
from jaxserve.fleet.messages import GetStats
from jaxserve.fleet.remote_engine import RemoteEngine
from jaxserve.sched.api.errors import Unavailable
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.wire import connection
from jaxserve.wire.address import Address
from tests.support.server.fronts import eventually
from tests.support.server.live import at_rest
from tests.support.server.told import Told
from tests.support.timing import PATIENCE

PROMPT = list(range(20, 50))
KEY = b"key"


@pytest.fixture
def beside(engine: Any, tmp_path: Path) -> Iterator[Callable[[Callable[[RemoteEngine], Awaitable[None]]], None]]:
    """Run a coroutine function with a RemoteEngine of the session's engine; the engine must be idle afterwards."""
    server = EngineServer(engine, KEY)
    address = server.start(Address(path=str(tmp_path / "socket")))

    def run(work: Callable[[RemoteEngine], Awaitable[None]]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(PATIENCE):
                remote = await RemoteEngine.connect(address, KEY)
                try:
                    await work(remote)
                finally:
                    remote.close()
                    await asyncio.sleep(0.01)

        asyncio.run(limited())
        at_rest(engine)
        engine.check()

    yield run
    server.close()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=1.0, seed=2**70 + 3, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    ],
    ids=["greedy", "sampled"],
)
def test_the_tokens_are_those_of_an_engine_in_this_process(engine: Any, beside: Any, params: SamplingParams) -> None:
    async def work(remote: RemoteEngine) -> None:
        there, here, loop = Told(), Told(), asyncio.get_running_loop()
        id = remote.submit(NewRequest(PROMPT, params, SLO()), there)
        engine.submit(NewRequest(PROMPT, params, SLO()), lambda delta: loop.call_soon_threadsafe(here, delta))
        await there.ended.wait()
        await here.ended.wait()
        assert there.tokens == here.tokens and len(there.tokens) == 24
        for name in ("logprobs", "prompt_logprobs"):
            mine, theirs = ([one for delta in told.deltas for one in getattr(delta, name)] for told in (there, here))
            assert [one.token for one in mine] == [one.token for one in theirs]
        times = remote.record(id)
        assert times is not None and len(times.token_times) == 24 and (times.ttft or 0) > 0
        assert remote.record(id) is None and engine.record(id) is None

    beside(work)


def test_a_front_that_leaves_takes_its_requests_along(beside: Any) -> None:
    async def work(remote: RemoteEngine) -> None:
        told = [Told() for _ in range(4)]
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        for one in told:
            remote.submit(NewRequest(PROMPT, params, SLO()), one)
        await asyncio.gather(*(one.begun.wait() for one in told))

    beside(work)


def test_an_engine_that_ends_ends_its_requests(engine: Any, beside: Any) -> None:
    async def work(remote: RemoteEngine) -> None:
        told, lost = Told(), list[str]()
        remote.on_lost = lost.append
        remote.submit(NewRequest(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), SLO()), told)
        await told.begun.wait()
        remote._connection.close("killed")  # what the loop calls when the other process has ended
        await told.ended.wait()
        assert told.deltas[-1].finish_reason == "unavailable"
        assert told.deltas[-1].error == remote.ailment == "the engine process has ended: killed" and lost == ["killed"]
        with pytest.raises(Unavailable, match="has ended: killed"):
            remote.submit(NewRequest(PROMPT, SamplingParams(), SLO()), told)
        with pytest.raises(Unavailable, match="has ended: killed"):
            await remote._call(GetStats)
        before = remote.stats()
        await remote.refresh()
        assert remote.stats() is before  # the last one stays

    beside(work)


def test_a_request_that_is_not_accepted_ends_with_the_error(
    engine: Any, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(remote: RemoteEngine, prompt: list[int]) -> JaxserveError | None:
        told = Told()
        id = remote.submit(NewRequest(prompt, SamplingParams(), SLO()), told)
        await told.ended.wait()
        (delta,) = told.deltas
        error = remote.refusal(id)
        assert delta.finish_reason == "rejected" and delta.error == str(error) and remote.refusal(id) is None
        return error

    async def work(remote: RemoteEngine) -> None:
        wrong = await refused(remote, [9_999_999])
        assert isinstance(wrong, InvalidValue) and wrong.param == "prompt"
        monkeypatch.setattr(engine._queue, "bound", 0)
        assert isinstance(await refused(remote, PROMPT), QueueFull)

    beside(work)


def test_outputs_of_one_prompt_do_not_fill_the_connection(beside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(remote: RemoteEngine) -> None:
        told = [Told() for _ in range(20)]
        params = SamplingParams(max_tokens=2, ignore_eos=True, stop=[f"{at} " * 200 for at in range(60)])
        for at, one in enumerate(told):
            own = replace(params, seed=at)
            remote.submit(NewRequest(prompt, own, SLO(), key=f"k-{at}"), one)
        await asyncio.gather(*(one.ended.wait() for one in told))
        assert {one.deltas[-1].finish_reason for one in told} == {"length"} and remote.healthy

    prompt = tuple(PROMPT)
    monkeypatch.setattr(connection, "UNREAD", 1 << 16)
    beside(work)


def test_a_request_that_the_engine_cannot_read_yet_is_refused_alone(
    beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(remote: RemoteEngine) -> None:
        told = list[Told]()
        with pytest.raises(Unavailable, match="has not yet read the requests before this one"):
            for at in range(200):
                one = Told()
                wanted = StructuredOutputs(choice=(f"{at}" * 20_000,))
                remote.submit(NewRequest(PROMPT, SamplingParams(max_tokens=2, structured_outputs=wanted), SLO()), one)
                told.append(one)
        assert told and remote.healthy
        for id in list(remote._listeners):
            remote.cancel(id)
        await asyncio.gather(*(one.ended.wait() for one in told))
        last = Told()
        remote.submit(NewRequest(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), SLO()), last)
        await last.ended.wait()
        assert last.deltas[-1].finish_reason == "length" and remote.healthy

    monkeypatch.setattr(connection, "UNREAD", 1 << 19)
    beside(work)


def test_a_request_that_the_engine_fails_to_take_is_refused_alone(
    beside: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(remote: RemoteEngine) -> None:
        honest, unlucky, last = Told(), Told(), Told()
        remote.submit(NewRequest(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), SLO()), honest)
        with monkeypatch.context() as patch:
            await eventually(lambda: honest.deltas)
            patch.setattr(engine, "submit", lambda *given: (_ for _ in ()).throw(MemoryError("no memory")))
            id = remote.submit(NewRequest(PROMPT, SamplingParams(max_tokens=2), SLO()), unlucky)
            await unlucky.ended.wait()
        assert isinstance(refusal := remote.refusal(id), Unavailable) and "no memory" in str(refusal)
        remote.submit(NewRequest(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), SLO()), last)
        for one in (honest, last):
            await one.ended.wait()
            assert one.deltas[-1].finish_reason == "length"

    beside(work)


def test_roles_and_the_prefix_cache(beside: Any) -> None:
    async def work(remote: RemoteEngine) -> None:
        before = remote.roles
        assert set(before) == {Role.PREFILL, Role.DECODE}
        mixed = dict.fromkeys(range(2), Role.MIXED)
        assert await asyncio.to_thread(remote.set_roles, mixed) == (Role.MIXED, Role.MIXED)
        with pytest.raises(InvalidValue, match="instance=7 must be 0 to 1"):
            await asyncio.to_thread(remote.set_roles, {7: Role.MIXED})
        assert await asyncio.to_thread(remote.set_roles, dict(enumerate(before))) == before
        assert await asyncio.to_thread(remote.reset_prefix_cache)
        assert not await asyncio.to_thread(remote.end_session, "unknown")

    beside(work)


def look_often(remote: RemoteEngine, silent: int = RemoteEngine.silent) -> None:
    """Look whether the engine has said anything each 10 ms; other engines of this process keep their pace."""
    remote.tick, remote.silent = 0.01, silent
    if remote._look is not None:
        remote._look.cancel()
    remote._listen()


def test_a_front_that_reads_slowly_loses_nothing(beside: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs wait for it: one request with many log-probabilities ends no other stream."""
    monkeypatch.setattr(connection, "UNREAD", 1 << 20)  # half of it has room for a step of several prompts, 0.1 MB each

    async def work(remote: RemoteEngine) -> None:
        remote.silent = 1 << 30  # a busy machine takes its time
        params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=20, prompt_logprobs=20)
        told = [Told() for _ in range(32)]
        for number, one in enumerate(told):
            remote.submit(NewRequest([number + 20] * 200, params, SLO()), one)
        await told[0].begun.wait()
        transport: Any = remote._connection._transport
        transport.pause_reading()
        await asyncio.to_thread(at_rest, engine)
        transport.resume_reading()
        await asyncio.gather(*(one.ended.wait() for one in told))
        assert {one.scores for one in told} == {(20, 199)} and not remote.lost

    beside(work)


def test_an_engine_that_hangs_is_lost(beside: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end, or go on elsewhere, and `refresh` waits for it no longer than a moment."""
    monkeypatch.setattr(under_test, "REFRESHING", 0.01)
    hanging = threading.Event()

    async def work(remote: RemoteEngine) -> None:
        look_often(remote, silent=1 << 30)
        told = Told()
        remote.submit(NewRequest(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), SLO()), told)
        await told.begun.wait()
        engine._loop.call_soon_threadsafe(hanging.wait, PATIENCE)
        try:
            await remote.refresh()
            assert not told.ended.is_set()
            remote.silent = 30
            await told.ended.wait()
            assert told.deltas[-1].finish_reason == "unavailable" and "has not responded for" in (remote.ailment or "")
        finally:
            hanging.set()

    beside(work)


def test_a_front_that_stood_still_itself_does_not_give_up(beside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.fleet.engine_server.SHARING", 0.01)

    async def work(remote: RemoteEngine) -> None:
        look_often(remote)
        time.sleep(remote.silent * 0.02)
        await asyncio.sleep(0.05)
        assert remote.healthy

    beside(work)


@pytest.mark.parametrize("wrong", ["version", "key"])
def test_another_version_or_key_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    server = EngineServer(engine, KEY)
    address = server.start(Address(host="127.0.0.1"))
    if wrong == "version":
        monkeypatch.setattr("jaxserve.fleet.engine_server.__version__", "0.0.9")
    why = "it is jaxserve 0.0.9, this is" if wrong == "version" else "another key"
    with pytest.raises(InvalidValue, match=why):
        asyncio.run(RemoteEngine.connect(address, KEY if wrong == "version" else b"other"))
    server.close()
