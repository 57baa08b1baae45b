"""The processes of a server are killed one by one, and the others do what docs/guide/scale.md says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

FLAGS = (
    "--port 0 --api-server-count 2 --max-model-len 256 --max-num-seqs 4 --max-num-batched-tokens 64 "
    "--kv-cache-memory 32MiB --disable-log-stats"
)
BODY: dict[str, Any] = {"prompt": "def main(", "max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
JOIN = 60.0  # seconds


def wait(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + JOIN
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Return the child processes that are not zombies, without multiprocessing's resource tracker."""
    made = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(FileNotFoundError):
            command = Path(f"/proc/{child}/cmdline").read_text()
            if "spawn_main" in command:
                made.append(child)
    return made


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


class Running:
    """A server with two fronts."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.engine, *self.fronts = children(process.pid)  # in the order of their starts

    def owners(self) -> dict[int, int]:
        """Return the process that has each open connection of this test, by the test's port."""
        port = int(self.url.rpartition(":")[2])
        found: dict[str, int] = {}
        for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, state, *_, inode = row.split()[:10]
            if int(local.split(":")[1], 16) == port and state == "01":
                found[inode] = int(remote.split(":")[1], 16)
        made = {}
        for pid in children(self.process.pid):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
                    if match and match[1] in found:
                        made[found[match[1]]] = pid
        return made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    command = [sys.executable, "-m", "jaxserve.run", *FLAGS.split()]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        found = (re.search(r"ready at (http://[\d.:]+)\.", line) for line in process.stdout)
        ready = next((match for match in found if match), None)
        assert ready is not None, (tmp_path / "log").read_text()[-2000:]
        yield Running(process, ready[1])
    finally:
        process.kill()
        process.communicate()


def asked(client: httpx.Client, url: str) -> httpx.Response:
    return client.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 4})


def total(url: str, name: str) -> float:
    """Return a metric, asked over a connection of its own."""
    text = httpx.get(f"{url}/metrics", timeout=JOIN).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"jaxserve:{name}{{"))


def test_each_process_dies(server: Running) -> None:
    url = server.url
    with httpx.Client(timeout=JOIN) as one, httpx.Client(timeout=JOIN) as other:
        assert asked(one, url).status_code == asked(other, url).status_code == 200
        # a front: its streams break, the other one goes on, the engine cancels, and a new front comes
        with one.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as broken:
            lines = broken.iter_lines()
            next(lines)
            port = broken.extensions["network_stream"].get_extra_info("client_addr")[1]
            killed = server.owners()[port]
            assert killed in server.fronts
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
        wait(lambda: len(children(server.process.pid)) == 3 and not alive(killed))
        wait(lambda: httpx.get(f"{url}/health", timeout=JOIN).status_code == 200)
        wait(lambda: total(url, "num_requests_running") == 0)
        assert total(url, "generation_tokens_total") >= 8, "metrics of a dead front are lost"
        # the engine: requests get 503
        with httpx.Client(timeout=JOIN) as third:
            with third.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as ended:
                lines = ended.iter_lines()
                next(lines)
                os.kill(server.engine, signal.SIGKILL)
                said = "".join(lines)
            assert '"code":"unavailable"' in said and said.endswith("data: [DONE]")
            refused = asked(third, url)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "unavailable"
            assert "the engine process has ended" in third.get(f"{url}/health").json()["error"]["message"]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(JOIN) == 0


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_one_that_watches(server: Running, number: signal.Signals) -> None:
    left = children(server.process.pid)
    assert len(left) == 3
    server.process.send_signal(number)
    assert server.process.wait(JOIN) == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    wait(lambda: not any(map(alive, left)))
