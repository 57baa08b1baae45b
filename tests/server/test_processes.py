"""The processes of a server are killed one by one, and the others do what docs/guide/scale.md says."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server.processes import JOIN, Running, alive, children, served
from tests.support.timing import until

BODY: dict[str, Any] = {"prompt": "def main(", "max_tokens": 200, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with served("--api-server-count 2", tmp_path / "log") as running:
        yield running


def asked(client: httpx.Client, url: str) -> httpx.Response:
    return client.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 4})


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
        until(lambda: len(children(server.process.pid)) == 3 and not alive(killed))
        until(lambda: httpx.get(f"{url}/health", timeout=JOIN, verify=False).status_code == 200)
        until(lambda: server.total("num_requests_running") == 0)
        assert server.total("generation_tokens_total") >= 8, "metrics of a dead front are lost"
        # the engine: requests get 503
        with httpx.Client(timeout=JOIN) as third:
            with third.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as ended:
                lines = ended.iter_lines()
                next(lines)
                os.kill(server.engines[0], signal.SIGKILL)
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
    until(lambda: not any(map(alive, left)))
