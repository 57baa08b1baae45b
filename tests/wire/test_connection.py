"""Frames arrive whole and in order, whatever the pieces; only processes with the key may talk."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidValue
from jaxserve.wire import connection as under_test
from jaxserve.wire.address import Address
from jaxserve.wire.connection import Connection, Side
from tests.support.loops import Closing, in_loop


class End:
    """One end, with everything that it received."""

    def __init__(self, key: bytes, side: Side) -> None:
        self.opened, self.frames, self.why = asyncio.Event(), list[bytes](), asyncio.get_running_loop().create_future()
        self.connection = Connection(
            key, side, opened=lambda _: self.opened.set(), received=self.frames.append, lost=self.why.set_result
        )


class Room(Closing):
    """Ends and listeners of one test, closed with it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "socket")
        self._ends, self._servers = list[End](), list[asyncio.Server]()

    def end(self, side: Side, key: bytes = b"k") -> End:
        self._ends.append(End(key, side))
        return self._ends[-1]

    async def listen(self, end: End, address: Address | None = None) -> Address:
        server, bound = await (address or Address(path=self.path)).listen(lambda: end.connection)
        self._servers.append(server)
        return bound

    async def pair(
        self, keys: Sequence[bytes] = (b"k", b"k"), sides: Sequence[Side] = ("engine", "front")
    ) -> list[End]:
        """Return both ends of a connection, not yet open."""
        one, other = (self.end(side, key) for side, key in zip(sides, keys, strict=True))
        await (await self.listen(one)).connect(lambda: other.connection)
        return [one, other]

    async def open(self) -> list[End]:
        """Return both ends of an open connection."""
        ends = await self.pair()
        for end in ends:
            await end.opened.wait()
        return ends

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for end in self._ends:
            end.connection.close()
        await asyncio.sleep(0.01)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


class Open(asyncio.Transport):
    def is_closing(self) -> bool:
        return False


@in_loop
async def test_frames_arrive_in_order_both_ways(room: Room) -> None:
    one, other = await room.open()
    sent = [bytes([at]) * at * at for at in range(100)]
    for frame in sent:
        one.connection.send(frame)
        other.connection.send(frame[::-1])
    while len(one.frames) < 100 or len(other.frames) < 100:
        await asyncio.sleep(0)
    assert other.frames == sent and one.frames == [frame[::-1] for frame in sent]
    one.connection.close()
    assert await other.why == "the other process closed the connection"
    assert await one.why == "closed"
    one.connection.send(b"late")  # does nothing


@given(st.lists(st.binary(max_size=40), max_size=10), st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_any_split_of_the_bytes_gives_the_same_frames(frames: list[bytes], sizes: Sequence[int]) -> None:
    seen = list[bytes]()
    end = Connection(b"k", "engine", opened=lambda _: None, received=seen.append, lost=lambda why: None)
    end._transport, end._frames, end._longest = Open(), end._received, under_test.LONGEST  # as after the proof
    stream, at = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames), 0
    for number in range(len(stream) + 1):
        size = sizes[number % len(sizes)]
        end.data_received(stream[at : at + size])
        at += size
    assert seen == frames


@pytest.mark.parametrize(
    ("keys", "sides"),
    [((b"k", b"other"), ("engine", "front")), ((b"k", b"k"), ("engine", "engine"))],
    ids=["another key", "the proof of the same side"],
)
@in_loop
async def test_the_wrong_proof_opens_nothing(room: Room, keys: Any, sides: Any) -> None:
    one, other = await room.pair(keys, sides)
    assert {await one.why, await other.why} & {"the other process has another key"}
    assert not one.opened.is_set() and not other.opened.is_set()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes, at most 32 are allowed"),
        (b"\0\0\0\3abc", "not a jaxserve process"),
    ],
)
@in_loop
async def test_other_protocols_are_refused(room: Room, sent: bytes, why: str) -> None:
    end = room.end("engine")
    await room.listen(end)
    _, writer = await asyncio.open_unix_connection(room.path)
    writer.write(sent)
    assert await end.why == why
    writer.close()


@in_loop
async def test_the_oldest_of_many_connections_without_a_proof_is_closed(room: Room) -> None:
    unproved: dict[Connection, None] = {}
    why = list[str]()

    def accept() -> Connection:
        return Connection(b"k", "engine", opened=lambda _: None, received=bytes, lost=why.append, unproved=unproved)

    server = await asyncio.get_running_loop().create_unix_server(accept, room.path)
    room._servers.append(server)
    writers = [(await asyncio.open_unix_connection(room.path))[1] for _ in range(under_test.UNPROVED + 3)]
    while len(why) < 3:
        await asyncio.sleep(0.001)
    assert set(why) == {"too many connections without proof of the key"} and len(unproved) == under_test.UNPROVED
    mine = room.end("front")
    await Address(path=room.path).connect(lambda: mine.connection)
    await mine.opened.wait()  # in spite of the others
    assert len(unproved) == under_test.UNPROVED - 1
    for writer in writers:
        writer.close()
    while unproved:
        await asyncio.sleep(0.001)


@in_loop
async def test_silence_is_not_a_proof(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "HANDSHAKE", 0.05)
    end = room.end("engine")
    bound = await room.listen(end, Address(host="127.0.0.1"))
    with socket.create_connection((bound.host, bound.port)):
        assert await end.why == "no proof of the key within 0.05 s"


@in_loop
async def test_an_end_that_does_not_read_is_cut_off(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "UNREAD", 1 << 20)
    one, other = await room.open()
    transport: Any = other.connection._transport
    transport.pause_reading()
    while not one.why.done():
        one.connection.send(bytes(1 << 18))
        await asyncio.sleep(0)
    assert await one.why == "the other process left 1 MiB unread"


@in_loop
async def test_a_sender_waits_for_a_slow_reader(room: Room) -> None:
    one, other = await room.open()
    transport: Any = other.connection._transport
    transport.pause_reading()
    for _ in range(8):
        one.connection.send(bytes(1 << 18))
    waiting = asyncio.ensure_future(one.connection.drained())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    transport.resume_reading()
    await waiting


@pytest.mark.parametrize("text", ["", "8000", "host", "host:", ":80", "host:http", "host:70000", "unix:"])
def test_a_bad_address_names_the_forms(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"must be HOST:PORT or unix:PATH"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["127.0.0.1:80", "[::1]:80", "host.example:0", "unix:/tmp/x"])
def test_an_address_prints_as_it_is_written(text: str) -> None:
    assert str(Address.parse(text)) == text


def test_an_address_without_a_listener_is_named(tmp_path: Path) -> None:
    for address in (Address(path=str(tmp_path / "none")), Address(host="127.0.0.1", port=1)):
        with pytest.raises(InvalidValue, match=r"no engine answers at .+ \("):
            asyncio.run(address.connect(asyncio.Protocol))
