"""A small server of the dashboard for one recorded run, on this machine only."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import nan
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.report.dashboard_page import ABOUT, HEADERS, PREFIX, File, about, files
from jaxserve.report.recorded_run import NONE, present_ended, present_run
from jaxserve.report.request_timeline import request_timeline
from jaxserve.report.snapshot_form import number
from jaxserve.sched.recorded.record import Recorder

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # other names in Host are of pages elsewhere (DNS rebinding)
REQUESTS = "/v1/requests"
JSON = "application/json"


class RecordedServer(ThreadingHTTPServer):
    """Serves the page and the run, which is made into JSON once."""

    daemon_threads = True

    def __init__(self, recorder: Recorder, title: str, port: int, classes: Mapping[int, str] = NONE) -> None:
        """Listen. port: 0 picks a free one. classes: see `present_run`. Raises InvalidValue if it is in use."""
        self._recorder = recorder
        self._fixed = {
            **files(),
            ABOUT: about(recorded={"title": title}),
            PREFIX + "run.json": _json(present_run(recorder, title, classes)),
            REQUESTS: _json({"object": "list", "data": present_ended(recorder, classes)}),
        }
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            text = (
                f"dashboard={port} cannot be listened on ({error.strerror}): choose another port, or 0 for a free one"
            )
            raise InvalidValue(text, "dashboard") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has left: the terminal shows the run."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def file(self, path: str) -> File | None:
        """Return what is at a path; None if nothing is."""
        if (fixed := self._fixed.get(path)) is not None:
            return fixed
        id = path.removeprefix(REQUESTS + "/")
        if id == path or not (id.isascii() and id.isdigit() and len(id) < 19):
            return None
        if int(id) not in self._recorder.requests:
            return None
        predicted = number(self._recorder.predicted.get(int(id), nan))
        return _json({**request_timeline(self._recorder, int(id)), "predicted_ttft": predicted})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RecordedServer

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal shows the run."""

    def version_string(self) -> str:
        """Name the server, without its version of Python."""
        return "jaxserve"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is not understood, in the form and with the policy of all answers."""
        self.close_connection = True
        self._send(int(code), _error(message or "this request is not understood"))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in NAMES:
            self._send(403, _error("this page is at localhost and 127.0.0.1 only"))
            return
        file = self.server.file(self.path.partition("?")[0])
        self._send(*((200, file) if file is not None else (404, _error("there is nothing here"))))

    def _send(self, status: int, file: File) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": file.type, "Content-Length": str(len(file.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(file.body)


def _json(value: Any) -> File:
    return File(JSON, json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def _error(text: str) -> File:
    return _json({"error": {"message": text}})


def show_run(recorder: Recorder, title: str, port: int, classes: Mapping[int, str]) -> None:
    """Serve a run until Ctrl-C."""
    with RecordedServer(recorder, title, port, classes) as server:
        print(f"the dashboard is at {server.url} until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
