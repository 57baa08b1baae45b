"""The reverse proxy configuration of docs/security.md in a real nginx in front of a server with an engine double."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.timing import PATIENCE, until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(NGINX is None or OPENSSL is None, reason="nginx or openssl is not installed")

BODY = {"prompt": "def main(", "max_tokens": 20, "ignore_eos": True}
# Text of the page, and its replacement in tests; each must occur once. Times and counts are shortened.
SHORTER = {
    "listen 443 ssl;": "listen 127.0.0.1:{port} ssl;",
    "/etc/ssl/server.pem": "{folder}/server.pem",
    "/etc/ssl/server.key": "{folder}/server.key",
    "http://127.0.0.1:8000;": "{url};",
    "client_header_timeout 10s;": "client_header_timeout 1s;",
    "client_body_timeout 10s;": "client_body_timeout 1s;",
    "send_timeout 30s;": "send_timeout 1s;",
    "limit_conn addresses 64;": "limit_conn addresses 3;",
}
AROUND = """
daemon off; pid nginx.pid; worker_processes 1; {user}
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    proxy_ignore_headers X-Accel-Buffering;  # our server says it; here the page alone must keep streams unbuffered
{page}
}}
"""


class Proxy:
    """nginx in a temporary folder. Call `stop` after it."""

    def __init__(self, folder: Path, page: str, url: str) -> None:
        assert NGINX is not None and OPENSSL is not None
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        certificate = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        certificate += ["-keyout", str(folder / "server.key"), "-out", str(folder / "server.pem"), "-days", "1"]
        certificate += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run(certificate, check=True, capture_output=True)
        user = "user root;" if os.geteuid() == 0 else ""  # its workers write into the folder
        (folder / "nginx.conf").write_text(
            AROUND.format(user=user, page=page.format(**vars(self), folder=folder, url=url))
        )
        command = [NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(command, stderr=self._log)
        self.tls = ssl.create_default_context(cafile=str(folder / "server.pem"))
        self.http = httpx.Client(base_url=f"https://127.0.0.1:{self.port}", verify=self.tls, timeout=20)
        until(lambda: self._listens() or self._process.poll() is not None, (folder / "log").read_text)
        assert self._process.poll() is None, (folder / "log").read_text()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def connection(self, buffer: int | None = None) -> ssl.SSLSocket:
        """Open a connection with a small receive buffer."""
        raw = socket.socket()
        if buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        raw.settimeout(PATIENCE / 3)  # less than the 60 s after which nginx cuts by default
        raw.connect(("127.0.0.1", self.port))
        return self.tls.wrap_socket(raw, server_hostname="localhost")

    def stop(self) -> None:
        self.http.close()
        self._process.terminate()
        self._process.wait(10)
        self._log.close()


@pytest.fixture
def page(repo: Path) -> str:
    """Return the configuration on the page as a template for `str.format`."""
    (found,) = re.findall(r"```nginx\n(.*?)```", (repo / "docs" / "guide" / "security.md").read_text(), re.S)
    text = found.replace("{", "{{").replace("}", "}}")
    for said, tested in SHORTER.items():
        assert text.count(said) == 1, said
        text = text.replace(said, tested)
    return text


@pytest.fixture
def proxied(tmp_path: Path, page: str) -> Iterator[Callable[..., Proxy]]:
    """A factory of proxies in front of a server: `proxied(live)`; `without` is removed from the configuration."""
    made: list[Proxy] = []

    def start(live: Any, without: str = "") -> Proxy:
        assert without in page
        made.append(Proxy(tmp_path, page.replace(without, "") if without else page, live.url))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def request(body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(("without", "made"), [("", range(1, 15)), ("proxy_buffering off;", range(20, 21))])
def test_streams_are_not_buffered(fake: Any, proxied: Any, without: str, made: range) -> None:
    """The second case shows that the first can fail: by default, nginx buffers the whole answer."""
    live = fake(delay=0.03)
    with proxied(live, without).http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert len(live.engine.submitted[0].output) in made
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_requests_pass_and_admin_routes_do_not(fake: Any, proxied: Any) -> None:
    proxy = proxied(fake(config={"admin_key": ("boss",)}))
    http = proxy.http
    answer = http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 20
    assert http.get("/health").status_code == 200
    for path in ("/v1/admin/roles", "/v1/admin", "//v1//admin/roles", "/v1/%61dmin/roles", "/v1/x/../admin/roles"):
        with proxy.connection() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer boss\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 403 "), path


def test_large_bodies_and_headers_are_refused(fake: Any, proxied: Any) -> None:
    live = fake()
    proxy = proxied(live)
    with proxy.connection() as connection:  # refused by the announced length, before any body is sent
        connection.sendall(request(b"", (8 << 20) + 1))
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    assert proxy.http.get("/health", headers={"x-large": "x" * 40_000}).status_code == 400
    assert proxy.http.post("/v1/completions", content=b"x" * (8 << 20)).status_code == 400  # reaches the server
    assert not live.engine.submitted


@pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\nHost: x\r\n", request(b'{"prompt"', 1000)])
def test_clients_that_stop_sending_are_cut(fake: Any, proxied: Any, sent: bytes) -> None:
    with proxied(fake()).connection() as connection:
        begin = time.monotonic()
        connection.sendall(sent)
        said = connection.recv(1000)
        assert said == b"" or said.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - begin > 0.9


def test_connections_per_address_are_bounded(fake: Any, proxied: Any) -> None:
    live = fake(delay=0.1)
    http = proxied(live).http
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(http.post, "/v1/completions", json=BODY) for _ in range(3)]
        until(lambda: len(live.engine.submitted) == 3)
        assert http.get("/health").status_code == 503
        assert [one.result(20).status_code for one in running] == [200] * 3
    assert http.get("/health").status_code == 200


def test_a_client_that_does_not_read_is_cut(fake: Any, proxied: Any) -> None:
    live = fake(max_model_len=500_000)
    body = json.dumps({**BODY, "max_tokens": 400_000, "stream": True, "logprobs": 2}).encode()
    with proxied(live).connection(buffer=4096) as connection:
        begin = time.monotonic()
        connection.sendall(request(body))
        assert connection.recv(10).startswith(b"HTTP/1.1 2")
        until(lambda: live.engine.cancelled)
        assert time.monotonic() - begin > 0.9 and len(live.engine.submitted[0].output) < 400_000


def test_a_client_that_disconnects_is_noticed(fake: Any, proxied: Any) -> None:
    live = fake(delay=0.05)
    with proxied(live).http.stream(
        "POST", "/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}
    ) as answer:
        next(answer.iter_lines())
    until(lambda: live.engine.cancelled)
    live.quiet()
