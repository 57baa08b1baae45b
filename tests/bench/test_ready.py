"""`jaxserve bench` waits for a server that starts, and only for such a one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxserve.bench import discover
from jaxserve.cli.main import main as jaxserve

WAITING = {"error": {"message": "the model is not ready: warming up", "code": "starting"}}
FLAGS = ["--num-prompts", "1", "--random-input-len", "4", "--random-output-len", "2"]


@contextmanager
def answering(*answers: tuple[int, Any]) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these answers to /health, the last one again and again, and 404 to all else."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = 404, {}
            if self.path == "/health":
                status, body = answers[min(asked.count("/health"), len(answers) - 1)]
            asked.append(self.path)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_load_waits_until_the_server_is_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discover, "POLL", 0.01)
    with answering((503, WAITING), (503, WAITING), (503, WAITING), (200, {})) as (url, asked):
        jaxserve(["bench", "--base-url", url, *FLAGS])
    assert asked[:4] == ["/health"] * 4 and asked[4] == "/v1/models"
    assert capsys.readouterr().out.count("the model is not ready: warming up; waiting") == 1


def test_the_wait_is_bounded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "POLL", 0.01)
    with answering((503, WAITING)) as (url, asked):
        assert jaxserve(["bench", "--base-url", url, *FLAGS, "--ready-check-timeout-sec", "50ms"]) == 2
    assert "is not ready after 0.05 s (--ready-check-timeout-sec): the model is not ready" in capsys.readouterr().err
    assert set(asked) == {"/health"}


@pytest.mark.parametrize(
    "answer",
    [
        (404, {}),
        (200, b""),
        (503, b""),
        (503, b"[]"),
        (503, {"error": "busy"}),
        (503, {"error": {"code": "unhealthy"}}),
    ],
)
def test_other_answers_are_none_of_its_business(answer: tuple[int, Any]) -> None:
    with answering(answer) as (url, asked):
        jaxserve(["bench", "--base-url", url, *FLAGS])
    assert asked[:2] == ["/health", "/v1/models"]


def test_the_look_can_be_left_out() -> None:
    with answering((503, WAITING)) as (url, asked):
        jaxserve(["bench", "--base-url", url, *FLAGS, "--ready-check-timeout-sec", "0s"])
    assert asked[0] == "/v1/models"
