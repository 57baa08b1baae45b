"""The process part of the fault matrix: a server on two instances of two emulated devices is terminated or killed.

Clients ask for streams and whole answers; some requests run, others wait. Faults that a server
survives are in tests/engine/test_fault_matrix.py.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.cli.replay import perf_of
from jaxserve.sched.journal import replay
from tests.support.server import processes
from tests.support.server.processes import Running
from tests.support.timing import until

pytestmark = pytest.mark.full
FLAGS = "--mesh 2x2 --kv-cache-memory 32MiB --preempt-boundary chunk"
TOKENS = 240
BODY: dict[str, Any] = {"prompt": "def main(", "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
JOIN = 60.0  # seconds in which every client learns the outcome of its request
FINISHED = "finished"
EVENT = "error event and [DONE]"
REFUSED = "503 shutting_down"
BROKEN = "connection broken"


def served(folder: Path, *flags: str) -> AbstractContextManager[Running]:
    """Start a server and wait until it is ready."""
    return processes.served(" ".join((FLAGS, *flags)), folder / "server.log")


def ask(server: Running, streaming: bool) -> str:
    """Ask for a stream or a whole answer and return its outcome."""
    body = {**BODY, "stream": streaming}
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=JOIN)
    except httpx.TransportError:
        return BROKEN
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.json()['error']['code']}"
    if not streaming:
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        return FINISHED
    got = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert got[-1] == "[DONE]", got[-2:]
    if '"shutting_down"' in got[-2]:
        return EVENT
    assert '"finish_reason":"length"' in got[-2], got[-2]
    return FINISHED


KINDS = {False: "whole answer", True: "stream"}


class Clients:
    """Active clients of every kind: 8 with running requests, and 16 with waiting ones."""

    def __init__(self, server: Running, threads: ThreadPoolExecutor) -> None:
        self._asked: list[tuple[str, Future[str]]] = []
        for kind in list(KINDS) * 4:
            self._asked.append((f"running {KINDS[kind]}", threads.submit(ask, server, kind)))
        until(lambda: server.total("num_requests_running") >= 8 and server.total("generation_tokens_total") >= 16)
        for kind in list(KINDS) * 8:
            self._asked.append((f"queued {KINDS[kind]}", threads.submit(ask, server, kind)))
        counts = ("num_requests_running", "num_requests_waiting", "request_success_total")
        until(lambda: sum(map(server.total, counts)) >= len(self._asked))  # each has reached the engine

    def got(self) -> dict[str, Counter[str]]:
        """Wait for all clients and count outcomes by kind of request. Fails if one hangs."""
        made: dict[str, Counter[str]] = {}
        for kind, future in self._asked:
            made.setdefault(kind, Counter())[future.result(JOIN)] += 1
        return made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as made:
        yield made


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[[str, dict[str, Counter[str]]], None]:
    """Record a row of the table that benchmarks/fault_matrix.py writes."""

    def note(fault: str, got: dict[str, Counter[str]]) -> None:
        record_property("fault", fault)
        record_property("at", "the process")
        told = [f"{kind}: " + ", ".join(f"{n} × {what}" for what, n in sorted(got[kind].items())) for kind in got]
        record_property("got", "; ".join(told))

    return note


def test_sigterm_lets_requests_finish(tmp_path: Path, threads: ThreadPoolExecutor, record: Any) -> None:
    with served(tmp_path, "--drain-timeout", "10min") as server:
        clients = Clients(server, threads)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: ask(server, False) == REFUSED)
        got = clients.got()
        assert server.process.wait(JOIN) == 0
        record("SIGTERM", got)
        assert all(set(each) == {FINISHED} for each in got.values()), got
        assert "Traceback" not in server.log.read_text()


def test_sigterm_past_its_drain_timeout(tmp_path: Path, threads: ThreadPoolExecutor, record: Any) -> None:
    with served(tmp_path, "--drain-timeout", "100ms") as server:
        clients = Clients(server, threads)
        server.process.send_signal(signal.SIGTERM)
        got = clients.got()  # none has finished, as all would with time
        assert server.process.wait(JOIN) == 0
        record("SIGTERM past the drain timeout", got)
        assert got["running stream"] == {EVENT: 4} and got["running whole answer"] == {REFUSED: 4}, got
        assert got["queued whole answer"] == {REFUSED: 8}
        assert set(got["queued stream"]) <= {EVENT, REFUSED} and got["queued stream"].total() == 8
        assert "Traceback" not in server.log.read_text()


def test_sigkill(tmp_path: Path, threads: ThreadPoolExecutor, record: Any) -> None:
    journal = tmp_path / "journal.jsonl"
    with served(tmp_path, "--journal", str(journal)) as server:
        clients = Clients(server, threads)
        server.process.kill()
        got = clients.got()
        record("SIGKILL", got)
        assert all(set(each) == {BROKEN} for each in got.values()), got
        assert server.process.wait(JOIN) == -signal.SIGKILL
        port = server.url.rpartition(":")[2]
    replayed = replay(journal.read_text().splitlines(), perf_of)
    assert not replayed.differences
    assert sum(len(one.output) for one in replayed.requests.values()) >= 16 and len(replayed.requests) >= 12
    with served(tmp_path, "--port", port, "--journal", str(journal)) as server:
        assert list(threads.map(lambda kind: ask(server, kind), KINDS)) == [FINISHED] * len(KINDS)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(JOIN) == 0
    assert not replay(journal.read_text().splitlines(), perf_of).differences
