"""KV pages arrive from another process as they were given, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
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
from jaxserve.kv import client as kv_client
from jaxserve.kv import server as kv_server
from jaxserve.kv.client import Destination, KVClient, WrongKV
from jaxserve.kv.direct import Direct, direct_host
from jaxserve.kv.remote import RemoteKV
from jaxserve.kv.server import KVServer
from jaxserve.kv.share import Transport
from jaxserve.sched.api.errors import Unavailable
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.wire.address import Address
from tests.support.examples import cases, examples
from tests.support.kv.given import DIGESTS, KEY, LAYOUT, PAGES, Given, content, place, serve
from tests.support.loops import Closing, in_loop

BOTH = pytest.mark.parametrize("transport", ["host", "direct"])


def asked(address: str) -> Request:
    return Request(0, NewRequest((1, 2, 3), SamplingParams(), SLO(), kv_from=address), 0.0)


class Room(Closing):
    """Both ends in one loop."""

    def __init__(self, path: Path, direct: Direct, dtype: Any) -> None:
        self.address = Address(path=str(path / "kv"))
        self.kv = content(dtype)
        self.given, self.place = Given(self.kv, 2), place(2, self.kv)
        self.direct, self.request = direct, asked(str(self.address))
        self.server: KVServer
        self._remotes = list[RemoteKV]()

    async def serve(self, **more: Any) -> None:
        self.server = serve(self.given, 2, self.direct, **more)
        await self.server.start(self.address)

    async def connect(self, transport: Transport, place: Destination | None = None) -> KVClient:
        return await KVClient.connect(self.address, KEY, place or self.place, self.direct, transport)

    def remote(self, transport: Transport) -> RemoteKV:
        self._remotes.append(RemoteKV(asyncio.get_running_loop(), KEY, self.place, self.direct, transport))
        return self._remotes[-1]

    def check(self, kv_buffer: Any, start: int) -> int:
        """Assert that a buffer has the pages from `start` on, and return where it ends."""
        assert kv_buffer is not None
        ((count, (array,)),) = kv_buffer.pieces
        assert count == kv_buffer.pages and array.sharding == self.place.arrays[0].sharding
        assert np.array_equal(np.asarray(array)[:, :, :count], self.kv[:, :, start : start + count])
        return start + count

    async def close(self) -> None:
        for remote in self._remotes:
            await remote.close()
        self.server.close()


@pytest.fixture(scope="session")
def direct() -> Direct:
    return Direct()


@pytest.fixture
def room(request: pytest.FixtureRequest, tmp_path: Path, direct: Direct) -> Room:
    """A room of this dtype."""
    return Room(tmp_path, direct, getattr(request, "param", np.float32))


@BOTH
@pytest.mark.parametrize("room", [np.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=str, indirect=True)
@in_loop
async def test_pages_arrive_as_they_were_given(room: Room, transport: Transport) -> None:
    await room.serve()
    client, at = await room.connect(transport), 0
    assert client.direct == (transport == "direct")
    while at < PAGES:
        at = room.check(await client.pages(DIGESTS[at:]), at)
    assert await client.pages([b"unknown"]) is None


@BOTH
@in_loop
async def test_pages_arrive_once_they_are_computed(room: Room, transport: Transport) -> None:
    room.given.there = 3
    await room.serve()
    client, at = await room.connect(transport), 0
    while at < 20:
        waiting = asyncio.ensure_future(client.there(DIGESTS[at], 5.0))
        if at >= room.given.there:
            await asyncio.sleep(0.01)
            assert not waiting.done()
            room.given.there += 7
        assert await waiting
        at = room.check(await client.pages(DIGESTS[at:20]), at)
    assert not await client.there(DIGESTS[30], 0.01)


@in_loop
async def test_an_answer_has_few_bytes(room: Room) -> None:
    await room.serve(page_bytes=kv_server.MOST_BYTES // 3)
    assert room.check(await (await room.connect("host")).pages(DIGESTS), 0) == 3


@pytest.mark.parametrize("field", LAYOUT.__struct_fields__)
@in_loop
async def test_another_layout_is_named(room: Room, field: str) -> None:
    await room.serve()
    value = getattr(LAYOUT, field)
    other: Any = value + 4 if isinstance(value, int) else (*value, value) if isinstance(value, tuple) else "other"
    room.place = room.place._replace(layout=msgspec.structs.replace(LAYOUT, **{field: other}))
    with pytest.raises(InvalidValue, match=rf"cannot be used: {field} is .+ there and .+ here"):
        await room.connect("auto")
    remote = room.remote("auto")
    assert await remote.fetch(room.request, DIGESTS, 0) is None and remote.fallbacks == 1
    assert remote.find(room.request, DIGESTS) == 0, "it is asked again at once"
    assert room.given.exports == 0


@in_loop
async def test_other_shards_come_through_the_host(room: Room) -> None:
    await room.serve()
    room.place = place(1, room.kv)
    client = await room.connect("auto")
    assert not client.direct
    room.check(await client.pages(DIGESTS), 0)
    with pytest.raises(InvalidValue, match="'direct' is not possible: shards are 2 shards there and 1 shards here"):
        await room.connect("direct")


@BOTH
@in_loop
async def test_wrong_content_is_not_used(room: Room, transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert await remote.fetch(room.request, DIGESTS, 0) is None
    assert remote.fallbacks == 1 and remote.pages == 0


@in_loop
async def test_pages_that_are_there_do_not_wait_for_those_that_are_not(room: Room) -> None:
    room.given.there = 16
    await room.serve()
    remote = room.remote("host")
    later = [asyncio.ensure_future(remote.fetch(room.request, DIGESTS, 16 + at, 30.0)) for at in range(8)]
    await asyncio.sleep(0.02)
    room.check(await asyncio.wait_for(remote.fetch(room.request, DIGESTS, 0, 30.0), 5.0), 0)
    assert not any(one.done() for one in later)
    room.given.there = PAGES
    for at, one in enumerate(later):
        room.check(await one, 16 + at)
    assert remote.fallbacks == 0


@BOTH
@in_loop
async def test_a_source_counts_what_came(room: Room, transport: Transport) -> None:
    await room.serve()
    remote = room.remote(transport)
    assert remote.find(room.request, DIGESTS) == PAGES and remote.find(asked(""), DIGESTS) == 0
    at = room.check(await remote.fetch(room.request, DIGESTS[:30], 5), 5)
    assert at == 21 and remote.pages == 16 and remote.bytes == 16 * room.kv[:, :, 0].nbytes
    assert 0 < remote.seconds(10) < 60 and remote.fallbacks == 0


@in_loop
async def test_a_source_expects_the_pages_that_the_request_names(room: Room) -> None:
    await room.serve()
    remote, room.request.digests = room.remote("host"), list(DIGESTS)
    for tokens, start, expected in ((0, 3, PAGES - 3), (40, 0, 10), (43, 4, 6), (40, 10, 0), (40, 20, 0)):
        room.request.asked = replace(room.request.asked, kv_tokens=tokens)
        assert remote.find(room.request, DIGESTS[start:]) == expected
    assert remote.find(room.request, []) == 0


@in_loop
async def test_a_source_survives_the_loss_of_the_other_end(room: Room) -> None:
    """It is not asked for a while, and then again, by a new connection."""
    await room.serve()
    now, remote = [0.0], room.remote("host")
    remote._now = lambda: now[0]
    await remote.fetch(room.request, DIGESTS, 0)
    room.given.there = 0
    waiting = asyncio.ensure_future(remote.fetch(room.request, DIGESTS, 0, 30.0))
    await asyncio.sleep(0.02)
    room.server.close()
    assert await waiting is None and remote.fallbacks == 1
    assert remote.find(room.request, DIGESTS) == 0
    now[0] = 10.0
    room.given.there = PAGES
    room.address.vacate()
    await room.serve()
    assert remote.find(room.request, DIGESTS) == PAGES
    room.check(await remote.fetch(room.request, DIGESTS, 0), 0)


@in_loop
async def test_closing_ends_connections_that_have_proved_nothing(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.wire.connection.HANDSHAKE", 3600.0)
    await room.serve()
    reader, writer = await asyncio.open_unix_connection(str(room.address).removeprefix("unix:"))
    await reader.readexactly(4)  # it is accepted: the length of the challenge has come
    room.server.close()
    assert len(await asyncio.wait_for(reader.read(), 10)) == 32, "the rest of the challenge, and the end"
    writer.close()


@in_loop
async def test_a_cancelled_fetch_leaves_nothing(room: Room) -> None:
    room.given.there = 0
    await room.serve()
    client = await room.connect("host")
    waiting = asyncio.ensure_future(client.there(DIGESTS[0], 30.0))
    await asyncio.sleep(0.02)
    (served,) = room.server._clients
    assert len(served._calls) == 1
    waiting.cancel()
    await asyncio.sleep(0.05)
    assert not served._calls and not client._answers


@in_loop
async def test_silence_ends_a_fetch(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_client, "SILENT", 0.05)
    await room.serve()
    client = await room.connect("host")
    (served,) = room.server._clients
    transport: Any = served.connection._transport
    transport.pause_reading()
    with pytest.raises(Unavailable, match=r"no KV came for 0\.05 s"):
        await client.pages(DIGESTS)


@in_loop
async def test_an_offer_that_is_not_pulled_ends(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process that stops amid a pull holds no memory here."""
    monkeypatch.setattr(kv_server, "OFFERED", 0.05)
    await room.serve()
    client = await room.connect("direct")
    never = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(client, "_pulled", lambda offer: never)
    waiting = asyncio.ensure_future(client.pages(DIGESTS))
    (served,) = room.server._clients
    while not served._taken:
        await asyncio.sleep(0.001)
    while served._taken or served._calls:
        await asyncio.sleep(0.001)
    waiting.cancel()


@BOTH
@pytest.mark.parametrize("moment", cases(["amid"], ["before", "after"]))
@in_loop
async def test_a_killed_giver_fails_one_fetch(
    tmp_path: Path, direct: Direct, transport: Transport, moment: str, repo: Path
) -> None:
    """The process that takes lives on, and knows that nothing came."""
    path, dim = tmp_path / "kv", 1 << 13
    kv = content(dim=dim)
    remote = RemoteKV(asyncio.get_running_loop(), KEY, place(2, kv), direct, transport)
    request = asked(f"unix:{path}")
    command = [sys.executable, "-m", "tests.support.kv.given", str(path), "2", str(dim)]
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=repo, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        if moment == "after":
            kv_buffer = await remote.fetch(request, DIGESTS, 0)
        fetching = asyncio.ensure_future(remote.fetch(request, DIGESTS, 16)) if moment == "amid" else None
        if fetching is not None:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
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
