"""Limits of memory and of open files are reached while processes serve: that request fails, others go on."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server.live import connect
from tests.support.server.processes import JOIN, Running, alive, children, served
from tests.support.timing import until

COMPLETIONS = "/v1/completions"
PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
FRONT = {
    "tokenize 7 MB": ("/tokenize", {"prompt": "word " * 1_400_000}),
    "detokenize 3.9 M ids": ("/detokenize", {"tokens": [5] * 3_900_000}),
    "a million numbers": (COMPLETIONS, {"prompt": [[5] * 10] * 100_000, "max_tokens": 2}),
}
ENGINE = {
    "many outputs": (COMPLETIONS, {**PROMPT, "max_tokens": 100, "n": 10, "logprobs": 20}),
    "an expression": (COMPLETIONS, {**PROMPT, "guided_regex": "[a-z]{1,500}"}),
    "the same again": (COMPLETIONS, {**PROMPT, "guided_regex": "[a-z]{1,500}"}),
}
REFUSED = (200, 400, 413, 503)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with served("--api-server-count 2", tmp_path / "log") as running:
        yield running


def mapped(pid: int) -> int:
    """Return the bytes of a process's address space."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmSize:")[2].split()[0]) << 10


def files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def limit(pid: int, which: int, value: int) -> None:
    """Set the soft limit of a process, which it may raise again."""
    resource.prlimit(pid, which, (value, resource.prlimit(pid, which)[1]))


def status(server: Running, path: str, body: dict[str, Any]) -> int:
    return httpx.post(server.url + path, json=body, timeout=JOIN, verify=False).status_code


def honest(server: Running) -> set[int]:
    return {status(server, COMPLETIONS, PROMPT) for _ in range(6)}


def attack(server: Running, attacks: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Send each attack four times at once, beside honest requests."""
    with ThreadPoolExecutor(4) as clients:
        for path, body in attacks.values():
            asked = [clients.submit(status, server, path, body) for _ in range(4)]
            assert honest(server) == {200}
            assert {one.result() for one in asked} <= set(REFUSED)


@pytest.mark.full
def test_a_front_without_memory_refuses_what_needs_it(server: Running) -> None:
    assert honest(server) == {200}
    for pid in server.fronts:
        limit(pid, resource.RLIMIT_AS, mapped(pid) + (100 << 20))
    attack(server, FRONT)
    assert all(map(alive, (*server.fronts, *server.engines))) and "Traceback" not in server.log.read_text()


@pytest.mark.full
def test_an_engine_without_memory_refuses_what_needs_it(server: Running) -> None:
    assert honest(server) == {200}
    until(lambda: "all 21 programs are ready" in server.log.read_text() or "21 of 21" in server.log.read_text())
    [engine] = server.engines
    limit(engine, resource.RLIMIT_AS, mapped(engine) + (30 << 20))
    attack(server, ENGINE)
    assert all(map(alive, (*server.fronts, engine))) and "a front has left" not in server.log.read_text()


@pytest.mark.full
def test_processes_that_may_open_no_more_files_serve_again_once_they_may(server: Running) -> None:
    assert honest(server) == {200}
    processes = (*server.fronts, *server.engines)
    before = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in processes}
    with httpx.Client(base_url=server.url, timeout=JOIN, verify=False) as kept:
        assert kept.post(COMPLETIONS, json=PROMPT).status_code == 200
        for pid in processes:
            limit(pid, resource.RLIMIT_NOFILE, files(pid))
        for _ in range(20):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url}/livez", timeout=3, verify=False)
        assert kept.post(COMPLETIONS, json=PROMPT).status_code == 200, "a connection that is open is served"
        assert kept.post(COMPLETIONS, json={**PROMPT, "guided_regex": "[0-9]"}).status_code == 503
    for pid, value in before.items():
        limit(pid, resource.RLIMIT_NOFILE, value)
    until(lambda: honest(server) == {200})
    assert set(children(server.process.pid)) >= set(processes) and server.log.stat().st_size < 20_000


@pytest.mark.full
def test_thousands_of_idle_connections_keep_no_request_out(tmp_path: Path) -> None:
    with served("--api-server-count 2 --max-connections 300", tmp_path / "log") as server, ExitStack() as held:
        before = server.log.stat().st_size
        for said in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"):
            for _ in range(1_500):
                held.enter_context(connect(server.url, said))
            assert honest(server) == {200}
        held.close()
        assert honest(server) == {200} and server.log.stat().st_size - before < 20_000


def test_a_request_without_memory_is_told_to_come_again(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live = fake()

    def submit(*given: Any) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(live.engine, "submit", submit)
        for body in (PROMPT, {**PROMPT, "stream": True}):
            answer = live.http.post(COMPLETIONS, json=body)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_memory"
            assert answer.headers["retry-after"] == "5"
    assert live.http.post(COMPLETIONS, json=PROMPT).status_code == 200
