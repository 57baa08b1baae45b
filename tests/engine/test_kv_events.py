"""Events of prefix caches reach a ZeroMQ subscriber, in vLLM's format, and name what caches hold."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime import kv_events
from jaxserve.engine.runtime.kv_events import END, KVEventFeed, number
from jaxserve.errors import InvalidValue
from jaxserve.fleet.supervisor import own_settings
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO
from jaxserve.sched.instance.block_pool import BlockPool, next_digest
from jaxserve.settings.kv_events import KVEvents

zmq: Any = pytest.importorskip("zmq", reason="ZeroMQ is not installed: .[events]")
SIZE = 4


class Instance:
    """What a feed reads of a scheduler."""

    def __init__(self, pages: int = 8) -> None:
        self.blocks = BlockPool(pages, SIZE)
        self.requests: list[Request] = []
        self.limits = type("Limits", (), {"page_size": SIZE})()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def store(self, id: int, tokens: list[int]) -> Request:
        """Compute a prompt: its full pages enter the cache."""
        request = Request(id, NewRequest(tokens, SamplingParams(), NO_SLO), 0.0)
        digests = [next_digest(request, SIZE) for _ in range(len(tokens) // SIZE)]
        known = self.blocks.match(digests)
        pages = self.blocks.take(digests[:known], len(digests) - known)
        assert pages is not None
        for page, digest, parent in zip(pages, digests, [b"", *digests], strict=False):
            self.blocks.register(page, digest, parent)
        request.pages = pages
        self.requests.append(request)
        return request

    def end(self, request: Request, feed: KVEventFeed) -> None:
        self.requests.remove(request)
        self.blocks.release(request.pages)
        feed.ended(request)


class Subscriber:
    """A router that follows events."""

    def __init__(self, feed: KVEventFeed, topic: str = "", rank: int = 0) -> None:
        endpoint, self._replay = feed.publishers[rank].endpoints
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
        self._socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.cache: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.numbers: list[int] = []
        time.sleep(0.2)  # a subscription takes a moment, as with every PUB socket

    def receive(self) -> Any:
        topic, sequence, content = self._socket.recv_multipart()
        self.numbers.append(int.from_bytes(sequence, "big"))
        return topic, self.apply(content)

    def apply(self, content: bytes) -> Any:
        made = msgspec.msgpack.decode(content)
        for kind, *fields in made[1]:
            if kind == "BlockStored":
                hashes, parent, tokens, size, lora, medium = fields
                assert size == SIZE and lora is None and medium == "GPU" and len(tokens) == size * len(hashes)
                for at, one in enumerate(hashes):
                    self.cache[one] = parent, tuple(tokens[at * size : (at + 1) * size])
                    parent = one
            elif kind == "BlockRemoved":
                for one in fields[0]:
                    del self.cache[one]
            else:
                assert kind == "AllBlocksCleared"
                self.cache.clear()
        return made

    def again(self, first: int) -> None:
        """Ask for batches from a sequence number on."""
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(str(self._replay).replace("0.0.0.0", "127.0.0.1"))
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        self._asked = socket

    def answers(self) -> list[tuple[int, bytes]]:
        made = []
        self._asked.setsockopt(zmq.RCVTIMEO, 5000)
        while True:
            _, sequence, content = self._asked.recv_multipart()
            if sequence == END:
                self._asked.close()
                return made
            made.append((int.from_bytes(sequence, "big"), content))

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def pair() -> Iterator[tuple[Instance, KVEventFeed, Subscriber]]:
    instance = Instance()
    given: Any = [instance]
    settings = KVEvents(True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="kv@pod@model")
    feed = KVEventFeed(settings, given)
    subscriber = Subscriber(feed, "kv@")
    yield instance, feed, subscriber
    subscriber.close()
    feed.close()


def held(instance: Instance) -> set[int]:
    return {number(one) for one in instance.blocks.digests}


def test_a_subscriber_knows_the_cache(pair):
    instance, feed, subscriber = pair
    first = instance.store(0, list(range(10)))
    feed.publish()
    topic, (moment, events, rank) = subscriber.receive()
    assert topic == b"kv@pod@model" and rank == 0 and abs(moment - time.time()) < 60
    assert len(events) == 1, "pages that follow each other are one event"
    assert [tokens for _, tokens in subscriber.cache.values()] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [parent for parent, _ in subscriber.cache.values()] == [None, number(first.digests[0])]
    second = instance.store(1, [*range(4), 9, 9, 9, 9])  # shares a page
    feed.publish()
    subscriber.receive()
    assert subscriber.cache[number(second.digests[1])] == (number(second.digests[0]), (9, 9, 9, 9))
    assert set(subscriber.cache) == held(instance)
    for one in (first, second):
        instance.end(one, feed)
    for id in range(2, 5):  # evicts
        instance.end(instance.store(id, [id] * 16), feed)
    feed.publish()
    subscriber.receive()
    assert set(subscriber.cache) == held(instance) and number(first.digests[1]) not in subscriber.cache
    assert subscriber.numbers == [0, 1, 2]
    feed.publish()
    assert feed.publishers[0]._next == 3, "nothing changed, so nothing is sent"


def test_an_empty_and_a_rebuilt_cache_are_cleared(pair):
    instance, feed, subscriber = pair
    instance.end(instance.store(0, list(range(8))), feed)
    feed.publish()
    subscriber.receive()
    instance.blocks.forget_idle()
    feed.publish()
    assert subscriber.receive()[1][1] == [["AllBlocksCleared"]] and not subscriber.cache
    instance.end(instance.store(1, list(range(8))), feed)
    feed.publish()
    subscriber.receive()
    instance.blocks = BlockPool(8, SIZE)
    later = instance.store(2, [7] * 4)
    feed.publish()
    subscriber.receive()
    assert set(subscriber.cache) == {number(later.digests[0])}


def test_missed_batches_can_be_asked_for_again(pair):
    instance, feed, subscriber = pair
    for id in range(3):
        instance.store(id, [id] * 4)
        feed.publish()
        subscriber.receive()
    subscriber.again(1)
    time.sleep(0.2)
    feed.publish()
    told = subscriber.answers()
    assert [sequence for sequence, _ in told] == [1, 2]
    known = set(subscriber.cache)
    subscriber.cache.clear()
    for _, content in told:
        subscriber.apply(content)
    assert len(subscriber.cache) == 2 and set(subscriber.cache) < known


def test_tokens_of_pages_that_left_are_forgotten(pair):
    instance, feed, _ = pair
    for id in range(30):
        instance.end(instance.store(id, [id] * 16), feed)
        feed.publish()
    assert len(feed._contents) <= 2 * instance.blocks.pages + 4 and not feed._contents._read


def test_replicas_continue_the_ranks():
    config = ServeConfig.load(replicas=3, mesh="2x1", kv_events_config='{"enable_kv_cache_events": true}')
    found = [own_settings(config, at).kv_events for at in range(3)]
    assert [one and one.first_rank for one in found] == [0, 2, 4]
    assert found[2] is not None and found[2].of(4) == ("tcp://*:5561", None)


def test_endpoints_of_further_instances():
    settings = KVEvents(True, endpoint="tcp://*:5557", replay_endpoint="tcp://*:6557")
    assert settings.of(0) == ("tcp://*:5557", "tcp://*:6557") and settings.of(2) == ("tcp://*:5559", "tcp://*:6559")
    assert KVEvents(True, endpoint="ipc:///tmp/x").of(1) == ("ipc:///tmp/x_dp1", None)
    assert KVEvents(True).published and not KVEvents(True, "null").published and not KVEvents().published


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endpoint": "localhost"}, "must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:99999"}, "must be tcp://HOST:PORT"),
        ({"publisher": "kafka"}, "'null', 'zmq'"),
        ({"hwm": 0}, "hwm=0 must be at least 1"),
        ({"endpont": "x"}, "did you mean"),
    ],
)
def test_mistakes_in_the_settings(given, message):
    with pytest.raises(InvalidValue, match=message) as refused:
        ServeConfig.load(kv_events_config=json.dumps(given))
    assert refused.value.param == "kv_events_config"


def test_a_port_in_use_and_a_missing_package(pair, monkeypatch):
    port = pair[1].publishers[0].endpoints[0].rpartition(":")[2]
    given: Any = [Instance()]
    with pytest.raises(InvalidValue, match=f"{port}.* cannot be used"):
        KVEventFeed(KVEvents(True, endpoint=f"tcp://*:{port}"), given)
    monkeypatch.setattr(kv_events.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidValue, match=r"pip install .*\[events\]'"):
        KVEventFeed(KVEvents(True), given)
