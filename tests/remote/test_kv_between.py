"""KV pages arrive from another process as they were given, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.programs.checksum import checksum, checksums
from jaxserve.errors import InvalidValue
from jaxserve.remote import kv_client, kv_server
from jaxserve.remote.address import Address
from jaxserve.remote.connection import Connection
from jaxserve.remote.kv_client import Giving, Place, WrongKV
from jaxserve.remote.kv_direct import Direct, direct_host
from jaxserve.remote.kv_remote import RemoteKV
from jaxserve.remote.kv_server import KVServer
from jaxserve.remote.kv_share import Transport
from jaxserve.sched.api.errors import Unavailable
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from tests.support.examples import examples
from tests.support.remote.kv_given import DIGESTS, KEY, LAYOUT, PAGES, Given, content, place, serve

BOTH = pytest.mark.parametrize("transport", ["host", "direct"])


@pytest.fixture(scope="session")
def direct() -> Direct:
    return Direct()


class Room:
    """Both ends in one loop."""

    def __init__(self, path: Path, direct: Direct, tp: int = 2, dtype: Any = np.float32) -> None:
        self.address = Address(path=str(path / "kv"))
        self.kv = content(dtype)
        self.given = Given(self.kv, tp)
        self.place = place(tp, self.kv)
        self.direct, self.tp = direct, tp
        self.server: KVServer
        self.givings = list[Giving]()

    async def serve(self, **more: Any) -> None:
        self.server = serve(self.given, self.tp, self.direct, **more)
        await self.server.start(self.address)

    async def connect(self, transport: Transport, place: Place | None = None) -> Giving:
        place = place or self.place
        self.givings.append(await Giving.connect(self.address, KEY, place, self.direct, transport))
        return self.givings[-1]

    def remote(self, transport: Transport) -> RemoteKV:
        return RemoteKV(asyncio.get_running_loop(), KEY, self.place, self.direct, transport)

    def check(self, kv_buffer: Any, start: int) -> int:
        """Assert that a buffer has the pages from `start` on, and return where it ends."""
        ((count, (array,)),) = kv_buffer.pieces
        assert count == kv_buffer.pages and array.sharding == self.place.arrays[0].sharding
        assert np.array_equal(np.asarray(array)[:, :, :count], self.kv[:, :, start : start + count])
        return start + count


async def fetched(giving: Giving) -> Any:
    """Return the first pages, which are there."""
    kv_buffer = await giving.pages(DIGESTS)
    assert kv_buffer is not None
    return kv_buffer


def asked(address: str) -> Request:
    request = Request(0, (1, 2, 3), SamplingParams(), SLO(), 0.0)
    request.kv_from = address
    return request


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=str)
def test_pages_arrive_as_they_were_given(tmp_path: Path, direct: Direct, transport: Transport, dtype: Any) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct, dtype=dtype)
        await room.serve()
        giving = await room.connect(transport)
        assert giving.direct == (transport == "direct")
        at = 0
        while at < PAGES:
            at = room.check(await giving.pages(DIGESTS[at:]), at)
        assert await giving.pages([b"unknown"]) is None
        room.server.close()

    run(work)


@BOTH
def test_pages_arrive_once_they_are_computed(tmp_path: Path, direct: Direct, transport: Transport) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        room.given.there = 3
        await room.serve()
        giving, at = await room.connect(transport), 0
        while at < 20:
            waiting = asyncio.ensure_future(giving.there(DIGESTS[at], 5.0))
            if at >= room.given.there:
                await asyncio.sleep(0.01)
                assert not waiting.done()
                room.given.there += 7
            assert await waiting
            at = room.check(await giving.pages(DIGESTS[at:20]), at)
        assert not await giving.there(DIGESTS[30], 0.01)
        room.server.close()

    run(work)


def test_an_answer_has_few_bytes(tmp_path: Path, direct: Direct) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve(page_bytes=kv_server.PARCEL // 3)
        assert (await fetched(await room.connect("host"))).pages == 3
        room.server.close()

    run(work)


@pytest.mark.parametrize("field", LAYOUT.__struct_fields__)
def test_another_layout_is_named(tmp_path: Path, direct: Direct, field: str) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        value = getattr(LAYOUT, field)
        other: Any = value + 4 if isinstance(value, int) else (*value, value) if isinstance(value, tuple) else "other"
        layout = msgspec.structs.replace(LAYOUT, **{field: other})
        with pytest.raises(InvalidValue, match=rf"cannot be used: {field} is .+ there and .+ here"):
            await room.connect("auto", room.place._replace(layout=layout))
        remote = room.remote("auto")
        remote._place = room.place._replace(layout=layout)
        request = asked(str(room.address))
        assert await remote.fetch(request, DIGESTS, 0) is None and remote.fallbacks == 1
        assert remote.find(request, DIGESTS) == 0, "it is asked again at once"
        assert room.given.exports == 0
        room.server.close()

    run(work)


def test_other_shards_come_through_the_host(tmp_path: Path, direct: Direct) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        room.place = place(1, room.kv)
        giving = await room.connect("auto")
        assert not giving.direct
        room.check(await fetched(giving), 0)
        with pytest.raises(InvalidValue, match="'direct' is not possible: shards are 2 shards there and 1 shards here"):
            await room.connect("direct")
        room.server.close()

    run(work)


@BOTH
def test_wrong_content_is_not_used(
    tmp_path: Path, direct: Direct, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        packed = kv_server._packed

        def flipped(export: Any) -> Any:
            (array,), sums = packed(export)
            array = array.copy()
            array[17] ^= 4
            return [array], sums

        monkeypatch.setattr(kv_server, "_packed", flipped)
        room.given.wrong = 1
        with pytest.raises(WrongKV, match="were given"):
            await (await room.connect(transport)).pages(DIGESTS)
        remote = room.remote(transport)
        assert await remote.fetch(asked(str(room.address)), DIGESTS, 0) is None
        assert remote.fallbacks == 1 and remote.pages == 0
        room.server.close()

    run(work)


def test_pages_that_are_there_do_not_wait_for_those_that_are_not(tmp_path: Path, direct: Direct) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        room.given.there = 16
        await room.serve()
        remote, request = room.remote("host"), asked(str(room.address))
        later = [asyncio.ensure_future(remote.fetch(request, DIGESTS, 16 + at, 30.0)) for at in range(8)]
        await asyncio.sleep(0.02)
        room.check(await asyncio.wait_for(remote.fetch(request, DIGESTS, 0, 30.0), 5.0), 0)
        assert not any(one.done() for one in later)
        room.given.there = PAGES
        for at, one in enumerate(later):
            room.check(await one, 16 + at)
        assert remote.fallbacks == 0
        await remote.close()
        room.server.close()

    run(work)


@BOTH
def test_a_source_counts_what_came(tmp_path: Path, direct: Direct, transport: Transport) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        remote, request = room.remote(transport), asked(str(room.address))
        assert remote.find(request, DIGESTS) == PAGES and remote.find(asked(""), DIGESTS) == 0
        at = room.check(await remote.fetch(request, DIGESTS[:30], 5), 5)
        assert at == 21 and remote.pages == 16 and remote.bytes == 16 * room.kv[:, :, 0].nbytes
        assert 0 < remote.seconds(10) < 60 and remote.fallbacks == 0
        await remote.close()
        room.server.close()

    run(work)


def test_a_source_expects_the_pages_that_the_request_names(tmp_path: Path, direct: Direct) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        remote, request = room.remote("host"), asked(str(room.address))
        request.digests = list(DIGESTS)
        for tokens, start, expected in ((0, 3, PAGES - 3), (40, 0, 10), (43, 4, 6), (40, 10, 0), (40, 20, 0)):
            request.kv_tokens = tokens
            assert remote.find(request, DIGESTS[start:]) == expected
        assert remote.find(request, []) == 0
        await remote.close()
        room.server.close()

    run(work)


def test_a_source_survives_the_loss_of_the_other_end(tmp_path: Path, direct: Direct) -> None:
    """It is not asked for a while, and then again, by a new connection."""

    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        now = [0.0]
        remote, request = room.remote("host"), asked(str(room.address))
        remote._now = lambda: now[0]
        await remote.fetch(request, DIGESTS, 0)
        room.given.there = 0
        waiting = asyncio.ensure_future(remote.fetch(request, DIGESTS, 0, 30.0))
        await asyncio.sleep(0.02)
        room.server.close()
        assert await waiting is None and remote.fallbacks == 1
        assert remote.find(request, DIGESTS) == 0
        now[0] = 10.0
        room.given.there = PAGES
        room.address.vacate()
        await room.serve()
        assert remote.find(request, DIGESTS) == PAGES
        room.check(await remote.fetch(request, DIGESTS, 0), 0)
        await remote.close()
        room.server.close()

    run(work)


def test_a_cancelled_fetch_leaves_nothing(tmp_path: Path, direct: Direct) -> None:
    async def work() -> None:
        room = Room(tmp_path, direct)
        room.given.there = 0
        await room.serve()
        giving = await room.connect("host")
        waiting = asyncio.ensure_future(giving.there(DIGESTS[0], 30.0))
        await asyncio.sleep(0.02)
        (taker,) = room.server._takers
        assert len(taker._calls) == 1
        waiting.cancel()
        await asyncio.sleep(0.05)
        assert not taker._calls and not giving._answers
        room.server.close()

    run(work)


def test_a_slow_link_is_slow_and_right(tmp_path: Path, direct: Direct) -> None:
    """Through a proxy that passes a few KiB at a time."""

    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        behind = room.address
        room.address = Address(path=str(tmp_path / "slow"))

        async def throttled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await reader.read(8192):
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(0.002)
            writer.close()

        async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, onward = await asyncio.open_unix_connection(behind.path)
            await asyncio.gather(throttled(reader, onward), throttled(there, writer))

        proxy = await asyncio.start_unix_server(joined, room.address.path)
        giving = await room.connect("host")
        began = time.monotonic()
        room.check(await fetched(giving), 0)
        assert time.monotonic() - began > 0.01
        giving.close()
        room.server.close()
        proxy.close()
        await asyncio.sleep(0.05)  # the proxy closes what it has opened

    run(work)


def test_silence_ends_a_fetch(tmp_path: Path, direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_client, "SILENT", 0.05)

    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        giving = await room.connect("host")
        (taker,) = room.server._takers
        transport: Any = taker.connection._transport
        transport.pause_reading()
        with pytest.raises(Unavailable, match=r"no KV came for 0\.05 s"):
            await giving.pages(DIGESTS)
        room.server.close()

    run(work)


def test_an_offer_that_is_not_pulled_ends(tmp_path: Path, direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process that stops amid a pull holds no memory here."""
    monkeypatch.setattr(kv_server, "OFFERED", 0.05)

    async def work() -> None:
        room = Room(tmp_path, direct)
        await room.serve()
        giving = await room.connect("direct")
        never = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(giving, "_pulled", lambda offer: never)
        waiting = asyncio.ensure_future(giving.pages(DIGESTS))
        (taker,) = room.server._takers
        await asyncio.sleep(0.03)
        assert taker._taken
        await asyncio.sleep(0.1)
        assert not taker._taken and not taker._calls
        waiting.cancel()
        room.server.close()

    run(work)


@BOTH
@pytest.mark.parametrize(
    "moment", [pytest.param("before", marks=pytest.mark.full), "amid", pytest.param("after", marks=pytest.mark.full)]
)
def test_a_killed_giver_fails_one_fetch(
    tmp_path: Path, direct: Direct, transport: Transport, moment: str, repo: Path
) -> None:
    """The process that takes lives on, and knows that nothing came."""
    path, dim = tmp_path / "kv", 1 << 13
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    command = [sys.executable, "-m", "tests.support.remote.kv_given", str(path), "2", str(dim)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=repo, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        killed_giver(process, path, dim, direct, transport, moment)


def killed_giver(
    process: subprocess.Popen[bytes], path: Path, dim: int, direct: Direct, transport: Transport, moment: str
) -> None:

    async def work() -> None:
        kv = content(dim=dim)
        where = place(2, kv)
        remote = RemoteKV(asyncio.get_running_loop(), KEY, where, direct, transport)
        request = asked(f"unix:{path}")
        if moment == "after":
            kv_buffer = await remote.fetch(request, DIGESTS, 0)
        fetching = asyncio.ensure_future(remote.fetch(request, DIGESTS, 16)) if moment == "amid" else None
        if fetching is not None:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if moment == "after":
            ((_, (array,)),) = kv_buffer.pieces
            assert np.array_equal(np.asarray(array), kv[:, :, :16])
        found = await (fetching or remote.fetch(request, DIGESTS, 16))
        if found is not None:  # all of it had come
            ((count, (array,)),) = found.pieces
            assert np.array_equal(np.asarray(array)[:, :, :count], kv[:, :, 16 : 16 + count])
        else:
            assert remote.fallbacks == 1
        assert moment == "amid" or found is None
        await remote.close()

    run(work)


def test_the_connection_waits_for_a_slow_reader(tmp_path: Path) -> None:
    async def work() -> None:
        ends = list[Connection]()

        def made(side: Any) -> Connection:
            ends.append(
                Connection(KEY, side, opened=lambda _: None, received=lambda frame: None, lost=lambda why: None)
            )
            return ends[-1]

        server, bound = await Address(path=str(tmp_path / "s")).listen(lambda: made("engine"))
        await bound.connect(lambda: made("front"))
        await asyncio.sleep(0.02)
        one, other = ends
        reading: Any = other._transport
        reading.pause_reading()
        for _ in range(8):
            one.send(bytes(1 << 18))
        waiting = asyncio.ensure_future(one.drained())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        reading.resume_reading()
        await waiting
        other.close()
        server.close()
        await asyncio.sleep(0.02)  # both ends learn of it

    run(work)


@pytest.mark.parametrize(
    ("address", "host"), [("unix:/tmp/x", "127.0.0.1"), ("10.0.0.7:1", "10.0.0.7"), ("0.0.0.0:1", None)]
)
def test_pulls_need_an_address_of_their_own(address: str, host: str | None) -> None:
    assert direct_host(Address.parse(address)) == host


@given(st.integers(0, 63), st.integers(0, 63), st.sampled_from([np.float32, jnp.bfloat16, jnp.int8]))
@settings(max_examples=examples(60))
def test_a_checksum_knows_every_element_and_its_place(one: int, other: int, dtype: Any) -> None:
    array = np.arange(1, 65).reshape(2, 4, 8).astype(dtype)
    whole, changed, swapped = int(checksum(jnp.asarray(array))), array.copy(), array.copy().reshape(-1)
    changed.reshape(-1)[one] = 0
    assert int(checksum(jnp.asarray(changed))) != whole
    swapped[one], swapped[other] = swapped[other], swapped[one]
    assert (int(checksum(jnp.asarray(swapped.reshape(array.shape)))) == whole) == (one == other)


def test_shards_have_checksums_of_their_own() -> None:
    kv = content()
    array = place(2, kv).arrays[0] + 1
    (sums,) = checksums([array])
    assert sums.shape == (2,)
