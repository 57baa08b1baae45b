"""The events of a serving engine tell a router the tokens of prompts and answers, and a reset."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jaxserve.engine.runtime.kv_events import KVEventFeed
from jaxserve.settings.kv_events import KVEvents

zmq: Any = pytest.importorskip("zmq", reason="ZeroMQ is not installed: .[events]")


def test_a_router_sees_prompts_and_resets(live, engine, monkeypatch):
    live.quiet()
    live.http.post("/reset_prefix_cache", json={}, headers={"Authorization": "Bearer boss"})

    def on_loop(work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        return engine.run(run)

    feed = on_loop(lambda: KVEventFeed(KVEvents(True, endpoint="tcp://*:0"), engine.schedulers))
    monkeypatch.setattr(engine, "_events", feed)  # `ended` is called for requests
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.subscribe("")
    for publisher in feed.publishers:
        socket.connect(publisher.endpoints[0].replace("0.0.0.0", "127.0.0.1"))
    stored: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}

    def receive(ranks: set[int]) -> list[Any]:
        """Publish, and read until each of these instances has sent a batch."""
        found, waiting = [], set(ranks)
        while waiting:
            _, _, content = socket.recv_multipart()
            _, events, rank = msgspec.msgpack.decode(content)
            waiting.discard(rank)
            for kind, *fields in events:
                found.append((rank, kind))
                if kind == "BlockStored":
                    hashes, _, given, size = fields[:4]
                    for at, one in enumerate(hashes):
                        stored[rank][one] = given[at * size : (at + 1) * size]
        return found

    try:
        tokens = live.http.post("/tokenize", json={"prompt": "x = [" + "7, " * 40}).json()["tokens"]
        body = {"prompt": tokens, "max_tokens": 20, "ignore_eos": True, "temperature": 0.0}
        time.sleep(0.3)  # a subscription takes a moment
        assert live.http.post("/v1/completions", json=body).status_code == 200
        live.quiet()
        on_loop(feed.publish)
        receive({0, 1})
        size = engine.schedulers[0].limits.page_size
        whole = len(tokens) // size
        pages = [tokens[at * size : (at + 1) * size] for at in range(whole)]
        for rank in (0, 1):  # prefill and decode instance
            assert len(stored[rank]) == len(engine.schedulers[rank].blocks.digests)
            assert list(stored[rank].values())[:whole] == pages
        assert set(stored[0]) <= set(stored[1]), "the same page has the same hash on both"
        live.http.post("/reset_prefix_cache", json={}, headers={"Authorization": "Bearer boss"})
        on_loop(feed.publish)
        assert sorted(receive({0, 1})) == [(0, "AllBlocksCleared"), (1, "AllBlocksCleared")]
    finally:
        socket.close(linger=0)
        monkeypatch.setattr(engine, "_events", None)
        on_loop(feed.close)
