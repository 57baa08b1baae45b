"""Mutated bodies against a real engine: each gets a valid answer, nothing hangs, and nothing is leaked.

`JAXSERVE_FUZZ_SEED=N` draws others; `pytest -m full tests/fuzz` takes 100,000. A failure prints the
case.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.app import create_app
from jaxserve.server.service import Service
from tests.support.fuzz.mutation import Case, case

BARE, FULL = 2_000, 100_000
AT_ONCE = 24
PATIENCE = 60.0  # seconds for one answer on a busy machine
ALLOWED = {200, 400, 401, 404, 413, 415, 429, 499, 503, 529}
OURS = {"queue_full"}  # codes of 503 and 529 that are expected here: the queue holds 64


async def ask(app: Any, one: Case) -> tuple[int, bytes]:
    """Call the application as a server would; returns status and body."""
    parts, status = [], 0
    told, left = 0, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal told
        told += 1
        half = len(one.body) // 2
        if told == 1:
            return {"type": "http.request", "body": one.body[:half], "more_body": True}
        if told == 2 and one.leaves != 0:
            return {"type": "http.request", "body": one.body[half:], "more_body": False}
        if one.leaves != 0:
            await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))
        if len(parts) == one.leaves:
            left.set()
        await asyncio.sleep(0)

    names = [(b"host", b"localhost"), *((name.encode(), value.encode("latin-1")) for name, value in one.headers)]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": one.path, "headers": names,
        "raw_path": one.path.encode(), "query_string": b"", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(parts)


def judge(one: Case, status: int, body: bytes) -> str | None:
    """Return what is wrong with an answer, or None."""
    if status not in ALLOWED:
        return f"status {status}"
    if one.leaves is not None:
        return None
    if status != 200:
        error = json.loads(body)["error"]
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            return "not the shape of an error"
        if status > 500 and error["code"] not in OURS:
            return f"a {status} that is not ours to give"
        return "megabytes repeated" if len(body) > 1500 or b"Q" * 201 in body else None
    blocks = [block for block in body.decode().split("\n\n") if not block.startswith(": ")]  # comments while it waits
    if blocks[0].startswith("event: "):
        return judge_named(blocks[:-1])
    if not blocks[0].startswith("data: "):
        json.loads(body)
        return None
    events = blocks[:-1]
    if events[-1] != "data: [DONE]":
        return "a stream without an end"
    for event in events[:-1]:
        data = json.loads(event.removeprefix("data: "))
        if "error" in data and not told_late(data["error"]):
            return "an error amid a stream"
    return None


def told_late(error: dict[str, Any]) -> bool:
    """Return whether an error event is a refusal that came after the stream's headers: a full queue, or a 400."""
    return error["code"] in OURS or error["type"] == "invalid_request_error"


ENDS = ("response.completed", "response.incomplete", "message_stop")


def judge_named(blocks: Sequence[str]) -> str | None:
    """Return what is wrong with a stream of responses or messages, or None."""
    events = []
    for block in blocks:
        name, _, data = block.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        if name != f"event: {events[-1]['type']}":
            return "an event that is not what its name says"
    if events[-1]["type"] == "error" and told_late(events[-1]["error"]):
        return None
    if events[-1]["type"] == "response.failed" and events[-1]["response"]["error"]["code"] == "invalid_prompt":
        return None
    return None if events[-1]["type"] in ENDS else "a stream without an end"


def memory() -> float:
    """Return the resident memory in MiB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def fuzz(service: Service, count: int) -> tuple[Counter[int], list[float]]:
    """Send `count` requests; returns the count of each status, and the memory after each tenth."""
    draw = random.Random(int(os.environ.get("JAXSERVE_FUZZ_SEED", "20")))
    app, seen, sizes = create_app(service), Counter[int](), list[float]()

    async def worker(cases: Iterator[Case]) -> None:
        for one in cases:
            try:
                status, body = await asyncio.wait_for(ask(app, one), PATIENCE)
                wrong = judge(one, status, body)
            except Exception as error:
                status, body, wrong = 0, b"", f"{type(error).__name__}: {error}"
            assert wrong is None, f"{wrong}: {one!r} got {status} {body[:500]!r}"
            seen[status] += 1

    async def main() -> None:
        for _ in range(10):
            cases = (case(draw) for _ in range(count // 10))
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(worker(cases))
            sizes.append(memory())
        end = asyncio.get_running_loop().time() + PATIENCE
        while (stats := service.engine.stats()).running or stats.waiting or stats.kv_usage:
            assert asyncio.get_running_loop().time() < end, f"not released by the engine: {stats}"
            await asyncio.sleep(0.02)

    asyncio.run(main())
    return seen, sizes


def check(service: Service, caplog: pytest.LogCaptureFixture, count: int, growth: float) -> None:
    """Fuzz and check for leaks; memory may grow by `growth` MiB after the first fifth."""
    with caplog.at_level(logging.WARNING):
        seen, sizes = fuzz(service, count)
    assert sum(seen.values()) == count
    assert seen[200] > count / 20 and seen[400] > count / 5 and seen[499], seen
    service.engine.check()
    assert service.active == 0 and service.prompts.texts.waiting == 0
    assert all(not client.inside and not client.queue for client in service.stage.clients.values())
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not errors, errors[:5]
    assert max(sizes[5:]) - max(sizes[:2]) < growth, f"memory grows: {[round(one) for one in sizes]} MiB"


def test_mutated_bodies(service, caplog):
    check(service, caplog, BARE, growth=40)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_mutated_bodies(service, caplog):
    check(service, caplog, FULL, growth=60)
