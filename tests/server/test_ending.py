"""Server shutdown: running requests get a final chunk, unread streams are cut, and an idle server ends at once."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.config import ServeConfig
from jaxserve.server.serving import announce, listen_on
from tests.support.timing import PATIENCE, until

LONG = {"prompt": "def main(", "max_tokens": 200, "ignore_eos": True}


def ended(live: Any) -> None:
    """Wait until the server's thread has ended."""
    live._thread.join(PATIENCE)
    assert not live._thread.is_alive()


def complains(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelname == "ERROR" or r.exc_info)


@pytest.mark.parametrize("how", ["now", "drain"])
def test_streams_end_with_an_error_and_done(fake, how, caplog):
    """Let `drain` be SIGTERM with requests that outlast the drain timeout, and `now` SIGINT. Alone, they end well."""
    live = fake(delay=0.1, config={"drain_timeout": "300ms"})
    with live.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        live.call(getattr(live.ending, how))
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["error"]["code"] == "shutting_down"
    ended(live)
    assert not complains(caplog)
    assert set(live.engine.cancelled.values()) == {"abort"}


def test_whole_answers_end_with_503(fake, caplog):
    live = fake(delay=0.1)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(httpx.post, f"{live.url}/v1/completions", json=LONG, timeout=60)
        until(lambda: live.engine.submitted)
        live.call(live.ending.now)
        answer = asked.result()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
    assert answer.headers["Retry-After"]
    ended(live)
    assert not complains(caplog)


def test_a_client_that_does_not_read_is_cut(fake, caplog):
    live = fake(max_model_len=200_000)
    host, port = live.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "max_tokens": 150_000, "stream": True, "logprobs": 2}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        connection.recv(100)
        time.sleep(0.5)  # the server's buffers fill up
        live.call(live.ending.now)
        ended(live)
    assert not complains(caplog)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_under_the_output_ends_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen_on("127.0.0.1", 0) as sock, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        announce(ServeConfig.load(), None, sock)
        with pytest.raises(OSError, match="No space"):
            full.flush()
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


SERVE = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from double import Double
import jaxserve.demo
from jaxserve.cli.main import dispatch
from jaxserve.server import main as server
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer

def start(config, told):
    engine = Double(delay=0.1)
    if "hung" in sys.argv:
        threading.Thread(target=threading.Event().wait).start()  # alone it would keep the interpreter for ever
        engine.close = lambda: False
    return Service(engine, Tokenizer.load(jaxserve.demo.model_path()), config)

server.start_service = start
sys.exit(dispatch("serve", ["--port", "0", "--drain-timeout", sys.argv[2], "--api-server-count", "0"]))
"""


@contextmanager
def serving(repo: Path, drain: str, *how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server in a process of its own; yields the process and the server's URL."""
    command = [sys.executable, "-c", SERVE, str(repo / "tests" / "support" / "server"), drain, *how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            (url,) = next(filter(None, (re.findall(r"ready at (http://[\d.:]+)\.", line) for line in process.stdout)))
            yield process, url
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_streams_and_process(number, repo):
    body = {**LONG, "stream": True}
    with serving(repo, "300ms") as (process, url):
        assert f"curl {url}/v1/completions" in next(process.stdout), "the line after that of the URL"
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE, verify=False) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "shutting_down" in rest[-2]
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "Traceback" not in errors, errors


def test_an_engine_that_does_not_close_does_not_block_the_exit(repo):
    """Nor does an idle server wait for its drain timeout."""
    with serving(repo, "600s", "hung") as (process, _):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
