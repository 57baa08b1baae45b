"""Bounds on unauthenticated clients: bytes, time and connections."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.server import protocol
from jaxserve.server.protocol import FILES, most_connections
from jaxserve.server.serving import KEEP_ALIVE, _server, listen_on
from tests.support.server.live import connect
from tests.support.timing import PATIENCE, in_time, once_in_time, until

GOOD = {"prompt": "x", "max_tokens": 2}
QUICK = {"HEADER_TIMEOUT": 0.4, "BODY_TIMEOUT": 0.6}
KEYS = {"api_key": ("sesame",)}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def read(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    parts = []
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionError:  # the server has closed while the test was sending
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def sent(live: Any, parts: Iterable[bytes], pause: float = 0.0) -> tuple[int, bytes, int]:
    """Send parts until the server closes; returns status, body and the number of bytes sent."""
    count = 0
    with connect(live.url) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                count += len(part)
                time.sleep(pause)
        except ConnectionError:
            pass
        answer = read(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body, count


def endless(first: bytes, part: bytes) -> Iterable[bytes]:
    yield first
    for _ in range(1 << 12):
        yield part


ENDLESS = (
    (HEAD, b"a: b\r\n" * 200),  # many headers
    (HEAD + b"a: ", b"b" * 4096),  # one endless header
    (HEAD, b"b" * 4096),  # an endless name
    (b"GET /", b"b" * 4096),  # an endless path
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 200),  # trailers
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"b" * 4096),  # a chunk extension
)


def test_headers_are_bounded(fake):
    live = fake(config=KEYS)
    for first, part in ENDLESS:
        status, body, count = sent(live, endless(first, part))
        assert count < 4 << 20, "the kernel's buffers may take some bytes"
        assert status in (0, 431, 401) and (not body or json.loads(body)["error"]["code"]), (first, status, body)
        assert live.http.get("/health").status_code == 200


def test_refusals_of_large_headers_name_the_limit(fake, monkeypatch):
    monkeypatch.setattr(protocol, "HEADER_SIZE", 2000)
    live = fake()
    status, body, _ = sent(live, [HEAD + b"a: " + b"b" * 2100 + b"\r\n\r\n"])
    assert status == 431 and "2000 bytes" in json.loads(body)["error"]["message"]
    assert live.http.get("/health", headers={"a": "b" * 1500}).status_code == 200
    status, body, _ = sent(live, [b"nonsense\r\n\r\n"])
    assert status == 400 and json.loads(body)["error"]["code"] == "invalid_http"


def test_small_chunks_do_not_count_as_headers(fake, monkeypatch):
    monkeypatch.setattr(protocol, "HEADER_SIZE", 2000)
    live = fake()
    body = json.dumps({**GOOD, "user": "x" * 4000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    status, answer, _ = sent(live, [HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n", chunks])
    assert status == 200 and b"choices" in answer


SLOW = (
    ([], 408),  # nothing at all
    ([b"\r\n"] * 60, 408),  # blank lines
    ([HEAD] + [b"a: b\r\n"] * 60, 408),  # slow headers
    ([HEAD + b"Content-Length: 999\r\n\r\n"] + [b"x"] * 60, 401),  # a slow body after its refusal
    ([HEAD + b"Authorization: Bearer sesame\r\nContent-Length: 999\r\n\r\n"] + [b"x"] * 60, 408),
    ([b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"] + [b"\r\n"] * 60, 200),  # blank lines after an answer
    ([b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\n"] + [b"a: b\r\n"] * 60, 200),
)


@once_in_time
def test_slow_clients_are_disconnected(fake, monkeypatch):
    for name, seconds in QUICK.items():
        monkeypatch.setattr(protocol, name, seconds)
    live = fake(config=KEYS)
    begin = time.monotonic()
    with ThreadPoolExecutor(len(SLOW)) as clients:
        told = list(clients.map(lambda one: sent(live, one[0], pause=0.05)[0], SLOW))
    assert told == [status for _, status in SLOW]
    in_time(time.monotonic() - begin < 2.5)


def test_a_slow_answer_has_no_deadline(fake, monkeypatch):
    for name, seconds in QUICK.items():
        monkeypatch.setattr(protocol, name, seconds)
    live = fake(delay=0.25)
    answer = live.http.post("/v1/completions", json={**GOOD, "prompt": [5], "max_tokens": 3})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3


ALIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


def test_connections_are_bounded(fake):
    live = fake(config={"max_connections": 5}, delay=PATIENCE)
    body = json.dumps({**GOOD, "stream": True}).encode()
    held = [connect(live.url, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) for _ in range(5)]
    until(lambda: len(live.engine.submitted) == 5)
    with connect(live.url) as further:
        answer = read(further)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer and b"--max-connections" in answer
    for one in held:
        one.close()
    live.engine.release()
    until(lambda: live.http.get("/health").status_code == 200)


@pytest.mark.parametrize("said", [b"", HEAD, b"\r\n"])
def test_connections_without_a_request_make_way(fake, said):
    """Otherwise 4,096 idle connections of a client would keep all others out."""
    live = fake(config={"max_connections": 5})
    kept = connect(live.url, ALIVE)
    assert kept.recv(65536).startswith(b"HTTP/1.1 200 ")
    held = [connect(live.url, said) for _ in range(40)]
    with connect(live.url, ALIVE) as further:
        assert further.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert b"too_many_connections" in read(held[0])  # the oldest ones have made way, and know why
    kept.sendall(ALIVE)
    assert kept.recv(65536).startswith(b"HTTP/1.1 200 "), "those that have sent a request stay for longer"
    for one in (kept, *held):
        one.close()


def test_connections_that_wait_for_a_further_request_make_way_last(fake):
    live = fake(config={"max_connections": 5})
    held = []
    for _ in range(6):
        held.append(connect(live.url, ALIVE))
        assert held[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
    assert read(held[0]) == b"", "closed as after --keep-alive-timeout"
    for one in held[1:]:
        one.sendall(ALIVE)
        assert one.recv(65536).startswith(b"HTTP/1.1 200 ")
    for one in held:
        one.close()


def test_clients_that_have_gone_without_a_word_are_noticed():
    with listen_on("127.0.0.1", 0) as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for name, value in KEEP_ALIVE.items():
                assert accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


def test_connections_stay_below_the_limit_of_open_files(caplog):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        assert most_connections(ServeConfig.load(max_connections=600)) == 600
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600 + FILES
        assert not caplog.records
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    wanted = before[1] if before[1] > 0 else 1 << 40
    if before[1] > 0:
        assert most_connections(ServeConfig.load(max_connections=wanted)) == before[1] - FILES
        assert "ulimit -n" in caplog.text
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_http_1_0_streams_are_not_chunked(plain):
    body = json.dumps({**GOOD, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with connect(plain.url) as connection:
        connection.sendall(request)
        head, _, text = read(connection).partition(b"\r\n\r\n")
    assert b" 200 " in head and b"chunked" not in head.lower() and b"connection: close" in head.lower()
    events = [line for line in text.split(b"\n\n") if line]
    assert all(event.startswith(b"data: ") for event in events) and events[-1] == b"data: [DONE]"
    assert b"content-type: text/event-stream" in head.lower() and b'"usage"' not in text
    with connect(plain.url) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        head, _, text = read(connection).partition(b"\r\n\r\n")
    assert json.loads(text)["object"] == "list" and b"content-length" in head


IGNORED = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def exchanged(live: Any, parts: Iterable[bytes]) -> bytes:
    """Send parts, then a request that ends the connection; return all answers."""
    with connect(live.url) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)  # the server reads each part by itself
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return read(connection)


@pytest.mark.parametrize("headers", [IGNORED, WEBSOCKET, b"Upgrade: foo\r\nConnection: keep-alive, upgrade\r\n"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_upgrades_are_ignored(plain, caplog, headers, chunked, apart):
    body = json.dumps(GOOD).encode()
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    size = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(body)
    head = HEAD + size + headers + b"\r\n"
    told = exchanged(plain, [head, framed] if apart else [head + framed])
    assert told.count(b"HTTP/1.1 200 ") == 2 and told.count(b"text_completion") == 1, told
    assert "WebSocket" not in caplog.text


@pytest.mark.parametrize("apart", [False, True])
def test_a_request_in_the_body_of_an_upgrade_is_not_answered(plain, apart):
    head = HEAD + IGNORED + b"Content-Length: %d\r\n\r\n" % len(HIDDEN)
    told = exchanged(plain, [head, HIDDEN] if apart else [head + HIDDEN])
    assert told.count(b"HTTP/1.1 ") == 2 and told.startswith(b"HTTP/1.1 400 ") and b'"list"' not in told, told


def test_pipelined_upgrades_are_answered_in_order(plain):
    upgrade = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + IGNORED + b"\r\n"
    told = exchanged(plain, [upgrade * 3 + HIDDEN])
    assert told.count(b"HTTP/1.1 200 ") == 5 and told.count(b'"list"') == 4, told


def test_requests_in_a_row_leave_time_for_others(fake, monkeypatch):
    """Many that were sent at once are answered one after the other, each some time after the one before."""
    monkeypatch.setattr(protocol, "IN_A_ROW", 0.05)
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    began = time.monotonic()
    _, rest, _ = sent(fake(), [(request + b"\r\n") * 9 + request + b"Connection: close\r\n\r\n"])
    assert rest.count(b"HTTP/1.1 200") == 9
    assert time.monotonic() - began >= 9 * 0.05


def test_too_many_requests_in_a_row_are_refused(fake):
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    status, body, _ = sent(fake(), [request * 5_000])
    assert status == 429 and f"more than {protocol.MOST_IN_A_ROW} requests wait" in body.decode()


def test_connect_is_refused_and_ends_the_connection(plain):
    with connect(plain.url) as connection:
        connection.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN)
        told = read(connection)
    assert told.startswith(b"HTTP/1.1 405 ") and told.count(b"HTTP/1.1 ") == 1, told


def test_an_idle_connection_stays_for_longer_than_a_proxy_keeps_it(fake: Any) -> None:
    """Closed by the server first, it would lose the request that is on its way."""
    assert _server(None, ServeConfig.load()).config.timeout_keep_alive > 60
    live, body = fake(config={"keep_alive_timeout": 0.3}), json.dumps(GOOD).encode()
    with connect(live.url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = read(connection)  # ends once the server closes
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" not in answer.lower()
