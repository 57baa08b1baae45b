"""Prefill and decode replicas: the tokens are those of one engine, and the KV of prompts arrives if nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.fleet.engine_server import EngineServer
from jaxserve.fleet.replicas import Replicas
from jaxserve.kv import server as kv_server
from jaxserve.kv.share import KVShare, Transport
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from tests.support.engine.fetches import PAGE, wait_for_pages
from tests.support.server.fronts import KEY, STYLES, among, eventually
from tests.support.server.live import ALONE, at_rest
from tests.support.server.told import Told

FULL = pytest.mark.full
PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED
PLAIN = (None, None)
EVERY = (*STYLES, {"temperature": 0.0, "max_tokens": 1}, {"temperature": 0.0, "min_tokens": 9, "logprobs": 2})
LENGTHS = (150, 9, 64, 40, 100, 33, 200, 17)


def asked(at: int) -> tuple[list[int], SamplingParams]:
    """Return the prompt and the parameters of a request."""
    prompt = [8 + (7 * at + 3 * place + at * place) % 4000 for place in range(LENGTHS[at % len(LENGTHS)])]
    return prompt, SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **EVERY[at % len(EVERY)]})


@pytest.fixture(scope="module")
def pair(engine: Any) -> Iterator[list[Any]]:
    """Two engines of one instance each."""
    from jaxserve.engine.engine import Engine

    made = [Engine.start(ServeConfig.load(mesh="1x1", max_num_queued_reqs=200, **ALONE)) for _ in range(2)]
    yield made
    for one in made:
        assert one.stats().compilations_after_warmup == 0
        one.close()


@pytest.fixture(scope="module")
def whole(pair: list[Any]) -> list[Told]:
    """The answers of one engine alone."""

    async def work() -> list[Told]:
        loop, told = asyncio.get_running_loop(), [Told() for _ in range(12)]
        for at, one in enumerate(told):
            prompt, params = asked(at)
            pair[0].submit(NewRequest(prompt, params, SLO()), partial(loop.call_soon_threadsafe, one))
        await asyncio.gather(*(one.ended.wait() for one in told))
        return told

    return asyncio.run(work())


class Replicated:
    """Replicas over two engines, each behind as many servers as there are roles for it."""

    def __init__(self, engines: list[Any], replicas: Replicas, servers: list[EngineServer]) -> None:
        self.engines, self.replicas, self.servers = engines, replicas, servers

    def submit(self, at: int) -> Told:
        told, (prompt, params) = Told(), asked(at)
        self.replicas.submit(NewRequest(prompt, params, SLO()), told)
        return told

    async def answers(self, count: int = 12) -> list[Told]:
        told = [self.submit(at) for at in range(count)]
        await asyncio.gather(*(one.ended.wait() for one in told))
        return told

    def computed(self) -> list[int]:
        """Return the tokens that each engine has computed as parts of prompts."""
        return [one.stats().counters.prompt_tokens for one in self.engines]


Work = Callable[[Replicated], Awaitable[None]]


@pytest.fixture
def serve(pair: list[Any], tmp_path: Path) -> Callable[..., None]:
    """Run a coroutine function with a replica for each role: prefill on the first engine, others on the second.

    Replicas without a role are one of each engine.
    """

    def run(work: Work, transport: Transport = "auto", roles: tuple[Role | None, ...] = (PREFILL, DECODE)) -> None:
        for one in pair:
            assert one.reset_prefix_cache()
        engines = pair if roles == PLAIN else [pair[role is not PREFILL] for role in roles]
        servers = [
            EngineServer(one, KEY, KVShare(b"other", role, transport)) for one, role in zip(engines, roles, strict=True)
        ]
        among(servers, tmp_path, lambda replicas: work(Replicated(pair, replicas, servers)))
        for one in pair:
            at_rest(one)
            one.check()

    return run


def same(told: list[Told], whole: list[Told]) -> None:
    for at, (one, other) in enumerate(zip(told, whole, strict=False)):
        assert one.tokens == other.tokens, at
        assert one.scores == other.scores, at
        assert one.deltas[-1].finish_reason == other.deltas[-1].finish_reason == "length", at


@pytest.mark.parametrize(
    ("transport", "roles"),
    [("direct", (PREFILL, PREFILL, DECODE)), ("host", (PREFILL, DECODE, DECODE)), ("auto", PLAIN)],
)
def test_tokens_are_those_of_one_engine(serve: Any, whole: list[Told], transport: Transport, roles: Any) -> None:
    async def work(made: Replicated) -> None:
        for _ in range(1 + (roles == PLAIN)):
            same(await made.answers(), whole)
            await asyncio.sleep(0.06)  # reports of the caches

    serve(work, transport, roles)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_pages(monkeypatch)


@pytest.mark.usefixtures("patient")
def test_the_kv_of_a_prompt_arrives(serve: Any, whole: list[Told]) -> None:
    """The replica that decodes computes what is not in whole pages."""

    async def work(made: Replicated) -> None:
        (_, before), pages, known = made.computed(), 0, 0
        for at in (0, 2, 6):
            told = made.submit(at)
            await told.ended.wait()
            assert told.tokens == whole[at].tokens
            pages += len(asked(at)[0]) // PAGE
            known += len(asked(at)[0]) + 1
        await made.replicas.refresh()
        giver, taker = (one.stats() for one in made.replicas.engines.values())
        assert taker.kv_fetched_pages == giver.kv_given_pages == pages
        assert taker.kv_fetch_fallbacks == 0 and taker.kv_fetched_bytes > 0
        assert made.computed()[1] - before == known - PAGE * taker.kv_fetched_pages
        assert giver.finished == taker.finished | giver.finished, "what is handed over has not ended"

    serve(work)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("transport", ["direct", "host"])
def test_replicas_fetch_prefixes_that_others_have(serve: Any, whole: list[Told], transport: Transport) -> None:
    """A request that cannot go to the replica with its prefix takes the pages from there, as many as it has."""

    async def work(made: Replicated) -> None:
        assert made.replicas.roles == (MIXED, MIXED)
        begin = made.computed()
        told = made.submit(6)
        await told.ended.wait()
        first = int(made.computed()[1] > begin[1])
        prompt, params = asked(6)
        longer = [*prompt, *range(8, 48)]
        like = Request(0, NewRequest(longer, params, SLO()), 0.0)
        await eventually(lambda: made.replicas.members.front.longer_hit(like, 1 - first) is not None)
        made.replicas.members.drain(first)
        before, told = made.engines[1 - first].stats(), Told()
        made.replicas.submit(NewRequest(longer, params, SLO()), told)
        await told.ended.wait()
        await made.replicas.refresh()
        giver, taker = (made.replicas.engines[at].stats() for at in (first, 1 - first))
        pages = len(prompt) // PAGE
        assert taker.kv_fetched_pages == giver.kv_given_pages == pages and taker.kv_fetch_fallbacks == 0
        assert taker.prefix_fetch_pages - before.prefix_fetch_pages == pages
        assert taker.prefix_fetch_failures == before.prefix_fetch_failures
        assert taker.counters.prompt_tokens - before.counters.prompt_tokens == len(longer) - PAGE * pages
        again, loop = Told(), asyncio.get_running_loop()
        elsewhere = partial(loop.call_soon_threadsafe, again)
        made.engines[first].submit(NewRequest(longer, params, SLO()), elsewhere)
        await again.ended.wait()
        assert again.tokens == told.tokens

    serve(work, transport, PLAIN)


def test_short_prompts_begin_where_they_decode(serve: Any, whole: list[Told]) -> None:
    async def work(made: Replicated) -> None:
        before = made.computed()
        told = made.submit(1)
        await told.ended.wait()
        assert told.tokens == whole[1].tokens
        assert made.computed()[0] == before[0] and made.computed()[1] == before[1] + LENGTHS[1]

    serve(work)


@pytest.mark.usefixtures("patient")
def test_a_wrong_checksum_is_computed_again(serve: Any, whole: list[Told], monkeypatch: pytest.MonkeyPatch) -> None:
    packed = kv_server._packed
    monkeypatch.setattr(kv_server, "_packed", lambda export: (packed(export)[0], (1,)))

    async def work(made: Replicated) -> None:
        same(await made.answers(), whole)
        await made.replicas.refresh()
        taker = made.replicas.engines[1].stats()
        assert taker.kv_fetched_pages == 0 and taker.kv_fetch_fallbacks > 0

    serve(work, "host")


def test_a_dead_kv_server_is_missed_by_no_token(serve: Any, whole: list[Told]) -> None:
    async def work(made: Replicated) -> None:
        assert made.servers[0].exchange is not None
        await asyncio.to_thread(made.servers[0].exchange.close)
        same(await made.answers(), whole)

    serve(work)


@pytest.mark.parametrize("lost", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("moment", [pytest.param(0.0, marks=FULL), 0.05, pytest.param(0.2, marks=FULL)])
def test_the_loss_of_a_side_changes_no_token(serve: Any, whole: list[Told], lost: int, moment: float) -> None:
    """What is left prefills and decodes."""

    async def work(made: Replicated) -> None:
        told = [made.submit(at) for at in range(12)]
        await asyncio.sleep(moment)
        await asyncio.to_thread(made.servers[lost].close)
        await asyncio.gather(*(one.ended.wait() for one in told))
        same(told, whole)
        same(await made.answers(), whole)

    serve(work)


def test_cancelled_requests_end_once(serve: Any) -> None:
    async def work(made: Replicated) -> None:
        for pause in (0.0, 0.01, 0.03, 0.06):
            told, (prompt, params) = Told(), asked(0)
            id = made.replicas.submit(NewRequest(prompt, params, SLO()), told)
            await asyncio.sleep(pause)
            made.replicas.cancel(id, "stop")
            await told.ended.wait()
            assert told.deltas[-1].finish_reason == "stop"
        told = Told()

        def stopping(delta: Any) -> None:
            told(delta)
            if delta.finish_reason is None:
                made.replicas.cancel(id, "stop")  # at the first token, as for a stop string

        id = made.replicas.submit(NewRequest(*asked(2), SLO()), stopping)
        await told.ended.wait()
        assert told.deltas[-1].finish_reason == "stop" and len(told.tokens) == 1
        assert not made.replicas.requests

    serve(work)


def test_roles_change_while_requests_run(serve: Any, whole: list[Told]) -> None:
    async def work(made: Replicated) -> None:
        assert made.replicas.roles == (PREFILL, DECODE)
        for roles in ({0: DECODE, 1: PREFILL}, {0: MIXED}, {1: DECODE}, {0: PREFILL}):
            running = asyncio.ensure_future(made.answers())
            await asyncio.sleep(0.03)
            wanted = tuple(roles.get(at, role) for at, role in enumerate(made.replicas.roles))
            assert await asyncio.to_thread(made.replicas.set_roles, roles) == wanted
            same(await running, whole)
        with pytest.raises(InvalidValue, match=r"roles=\['decode', 'decode'\] are incomplete: some replica must"):
            await asyncio.to_thread(made.replicas.set_roles, {0: DECODE})
        assert made.replicas.roles == (PREFILL, DECODE)

    serve(work)
