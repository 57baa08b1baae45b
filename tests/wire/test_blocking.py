"""Ends that wait speak with each other and with those of an event loop, and only if both have the key."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import closing

import pytest

from jaxserve.wire import blocking
from jaxserve.wire.blocking import BlockingConnection, Disconnected, Listener, connect
from jaxserve.wire.connection import Connection, Side
from tests.support.loops import in_loop
from tests.support.wire import KEY, connected


def test_frames_arrive_whole_and_in_order() -> None:
    here, there = connected()
    frames = [b"", b"x", bytes(range(256)) * 8192, b"last"]
    with closing(here), closing(there):
        assert not there.ready()
        sending = threading.Thread(target=lambda: [here.send(one) for one in frames])
        sending.start()
        assert there.ready(60)
        assert [there.receive() for _ in frames] == frames
        sending.join()


def test_an_end_that_closes_is_noticed() -> None:
    here, there = connected()
    with closing(there):
        here.close()
        assert there.ready(60)
        with pytest.raises(Disconnected, match="closed the connection"):
            there.receive()


def test_a_frame_that_is_too_long_ends_the_connection() -> None:
    here, there = connected()
    with closing(here), closing(there):
        here.send(bytes(9))
        with pytest.raises(Disconnected, match="a frame of 9 bytes, at most 8 are allowed"):
            there.receive(8)


@pytest.mark.parametrize(
    ("keys", "sides"),
    [((KEY, b"another"), ("engine", "front")), ((KEY, KEY), ("engine", "engine"))],
    ids=["another key", "the proof of the same side"],
)
def test_the_wrong_proof_opens_nothing(keys: tuple[bytes, bytes], sides: tuple[Side, Side]) -> None:
    with pytest.raises(Disconnected, match="has another key"):
        connected(keys, sides)


def test_a_listener_turns_strangers_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "HANDSHAKE", 0.2)
    listener = Listener("127.0.0.1", KEY)
    ends = list[BlockingConnection]()
    accepting = threading.Thread(target=lambda: ends.append(listener.accept()))
    accepting.start()
    with (
        closing(listener),
        socket.create_connection(listener.address),
        socket.create_connection(listener.address) as loud,
    ):
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(OSError):
            connect(listener.address, b"another")
        monkeypatch.undo()
        with closing(connect(listener.address, KEY)) as mine:
            accepting.join(60)
            with closing(ends[0]):
                mine.send(b"hello")
                assert ends[0].receive() == b"hello"


@in_loop
async def test_both_kinds_of_ends_speak_the_same() -> None:
    listener, frames = Listener("127.0.0.1", KEY), list[bytes]()
    opened, lost = asyncio.Event(), asyncio.Event()
    end = Connection(KEY, "front", opened=lambda _: opened.set(), received=frames.append, lost=lambda why: lost.set())

    def answer() -> None:
        with closing(listener), closing(listener.accept()) as other:
            other.send(other.receive() * 2)

    answering = asyncio.create_task(asyncio.to_thread(answer))
    await asyncio.get_running_loop().create_connection(lambda: end, *listener.address)
    await opened.wait()
    end.send(b"ab")
    await answering
    await lost.wait()
    assert frames == [b"abab"]
