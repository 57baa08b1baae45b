"""A server that starts: state at once, and each request answered once, when the engine is ready or cannot be."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache_folder import cache_folder
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.report.start import CONNECTING, LAUNCHING, LOADING, MEASURING, WARMING, StartProgress, slowest
from jaxserve.server import door as doors
from jaxserve.server import protocol
from jaxserve.server.door import Door, ServerStart
from jaxserve.server.keys import Keys
from jaxserve.server.service import Service
from jaxserve.server.serving import Interrupted
from jaxserve.server.start_times import StartTime, expectation, last_start, remember
from jaxserve.tokenizer import Tokenizer
from tests.support.examples import examples
from tests.support.server.double import Double
from tests.support.server.live import connect
from tests.support.server.starting import Starting
from tests.support.timing import PATIENCE, until

COMPLETIONS = "/v1/completions"
PAGE = "https://chat.example.com"


def body(number: int = 0, **more: Any) -> dict[str, Any]:
    return {"prompt": [20 + number, 21], "max_tokens": 4, "ignore_eos": True, **more}


class Made:
    """Starting servers, and engine doubles for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.all: list[Starting] = []
        self._services: list[Service] = []
        self._threads = ThreadPoolExecutor(16)

    def __call__(self, last: StartTime | None = None, **settings: Any) -> Starting:
        self.all.append(Starting(ServeConfig.load(disable_log_stats=True, **settings), last))
        return self.all[-1]

    def open(self, one: Starting, **more: Any) -> Double:
        """Let the engine of a server be ready."""
        engine = Double(**more)
        self._services.append(Service(engine, self._tokenizer, one.config))
        one.open(self._services[-1])
        return engine

    def ask(self, one: Starting, json: Any, path: str = COMPLETIONS, **more: Any) -> Future[httpx.Response]:
        """Send a request in a thread of its own."""
        return self._threads.submit(httpx.post, f"{one.url}{path}", json=json, timeout=PATIENCE, verify=False, **more)

    def close(self) -> None:
        for one in self.all:
            one.stop()
        self._threads.shutdown()
        for service in self._services:
            service.close()


@pytest.fixture
def starts(tokenizer: Tokenizer) -> Iterator[Made]:
    made = Made(tokenizer)
    yield made
    made.close()


def waiting(one: Starting, requests: int) -> None:
    """Wait until so many requests wait."""
    until(lambda: one.door.waiting == requests)


def request(content: Any, head: str = "", path: str = COMPLETIONS) -> bytes:
    data = json.dumps(content).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Check the status of an error and return its body."""
    assert answer.status_code == status, answer.text
    if status == 503:
        assert int(answer.headers["Retry-After"]) >= 1
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_the_state_before_and_after(starts: Made) -> None:
    one = starts()
    assert one.http.get("/livez").status_code == one.http.head("/livez").status_code == 200
    assert one.http.get("/").status_code == one.http.get("/dashboard/app.js").status_code == 200
    for path in ("/health", "/readyz", "/ping"):
        assert error(one.http.get(path), 503)["code"] == "starting"
    assert one.http.head("/health").status_code == one.http.post("/ping").status_code == 503
    one.progress = StartProgress(WARMING, 12, 248)
    answer = one.http.get("/health")
    assert answer.json()["error"]["message"] == "the model is not ready: warming up, 12 of 248 programs"
    state = answer.json()["startup"]
    assert (state["step"], state["done"], state["total"]) == (WARMING, 12, 248)
    assert state["elapsed_seconds"] > 0 and state["last_start_seconds"] is state["seconds_left"] is None
    assert 'jaxserve:ready{model_name="jaxserve-demo"} 0.0' in one.http.get("/metrics").text
    models = one.http.get("/v1/models").json()
    single = one.http.get("/v1/models/jaxserve-demo").json()
    assert error(one.http.get("/v1/models/other"), 404)["code"] == "model_not_found"

    starts.open(one, max_model_len=2048)  # as the demo model has
    for path in ("/health", "/readyz", "/ping", "/livez"):
        assert one.http.get(path).status_code == 200
    assert 'jaxserve:ready{model_name="jaxserve-demo"} 1.0' in one.http.get("/metrics").text
    assert one.http.get("/v1/models").json() == models and single in models["data"]
    assert one.http.get("/v1/models/jaxserve-demo").json() == single
    assert one.http.get("/version").status_code == 200


def test_retry_after_follows_the_last_start(starts: Made) -> None:
    one = starts(last=StartTime(20.0))
    answer = one.http.get("/health")
    left = answer.json()["startup"]["seconds_left"]
    assert 0 < left < 20 and left - 1 < int(answer.headers["Retry-After"]) <= 20
    assert answer.json()["startup"]["last_start_seconds"] == 20.0
    assert int(starts(last=StartTime(500.0)).http.get("/health").headers["Retry-After"]) == doors.MOST
    assert int(starts(last=StartTime(1e-9)).http.get("/health").headers["Retry-After"]) == doors.UNKNOWN


def test_waiting_requests_are_answered_once(starts: Made) -> None:
    one = starts()
    asked = [starts.ask(one, body(number)) for number in range(8)]
    streamed = starts.ask(one, body(8, stream=True), headers={"X-Request-Id": "mine"})
    unknown = starts.ask(one, {}, "/v2/nothing")
    waiting(one, 10)
    began = time.monotonic()
    engine = starts.open(one)
    for each in asked:
        answer = each.result()
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert streamed.result().text.rstrip().endswith("data: [DONE]")
    assert streamed.result().headers["X-Request-Id"] == "mine" and "cmpl-mine" in streamed.result().text
    assert error(unknown.result(), 404)["code"] == "unknown_route"
    assert sorted(one.prompt[0] for one in engine.submitted) == [20 + number for number in range(9)]
    assert all(request.arrival < began for request in engine.submitted), "the wait counts for the objectives"
    assert one.door.waiting == 0
    assert one.http.post(COMPLETIONS, json=body()).status_code == 200
    assert engine.submitted[-1].arrival > began


def test_a_connection_goes_on_with_the_service(starts: Made) -> None:
    """A probe, two pipelined requests that wait, the second with a body in parts, and a body around the opening."""
    one = starts()
    second, third = request(body(1, stream=True)), request(body(2))
    probe = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(one.url, probe, request(body(0)), second[:-10]) as connection, connect(one.url, third[:-10]) as other:
        waiting(one, 2)
        engine = starts.open(one)
        other.sendall(third[-10:])
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(second[-10:])
        text = b""
        while b"[DONE]" not in text:
            part = connection.recv(65536)
            assert part, text
            text += part
    assert text.count(b"HTTP/1.1 200") == 3
    prompts = [one.prompt[0] for one in engine.submitted]
    assert sorted(prompts) == [20, 21, 22] and prompts.index(20) < prompts.index(21)


def test_a_body_need_not_be_complete_again_within_the_timeout(starts: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT", 0.1)
    monkeypatch.setattr(protocol, "BODY_TIMEOUT", 0.1)
    one = starts()
    asked = starts.ask(one, body())
    waiting(one, 1)
    time.sleep(0.3)
    starts.open(one)
    assert asked.result().status_code == 200
    with connect(starts().url, request(body())[:-5]) as late:
        assert late.recv(65536).startswith(b"HTTP/1.1 408")


def test_requests_may_be_refused_at_once(starts: Made) -> None:
    one = starts(queue_at_start=False)
    assert error(one.http.post(COMPLETIONS, json=body()), 503)["code"] == "starting"
    anthropic = one.http.post("/v1/messages", json={}).json()
    assert anthropic["type"] == "error" and "the model is not ready" in anthropic["error"]["message"]
    assert one.http.get("/v1/models").status_code == 200
    starts.open(one)
    assert one.http.post(COMPLETIONS, json=body()).status_code == 200


def test_a_client_that_leaves_gives_up_its_place(starts: Made) -> None:
    one = starts(max_num_queued_reqs=2)
    leaving, staying = connect(one.url, request(body(1))), starts.ask(one, body(2))
    waiting(one, 2)
    assert one.http.get("/health").json()["startup"]["requests_waiting"] == 2
    assert error(one.http.post(COMPLETIONS, json=body(3)), 503)["code"] == "queue_full"
    leaving.close()
    waiting(one, 1)
    late = starts.ask(one, body(4))
    waiting(one, 2)
    engine = starts.open(one)
    assert late.result().status_code == staying.result().status_code == 200
    assert sorted(one.prompt[0] for one in engine.submitted) == [22, 24]


def test_waiting_bodies_are_bounded(starts: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "BODIES", 2)
    one = starts(max_body_size=1000)
    large = body(pad="x" * 800)
    unmeasured = one.http.post(COMPLETIONS, content=iter([b"x" * 600] * 2))
    assert error(unmeasured, 413)["code"] == "body_too_large"
    asked = [starts.ask(one, large) for _ in range(2)]
    until(lambda: one.door._bytes > 1600)
    assert error(one.http.post(COMPLETIONS, json=large), 503)["code"] == "queue_full"
    assert error(one.http.post(COMPLETIONS, json=body(pad="x" * 1000)), 413)["code"] == "body_too_large"
    small = starts.ask(one, body())
    waiting(one, 3)
    starts.open(one)
    assert small.result().status_code == 200
    assert [each.result().status_code for each in asked] == [200, 200]


def test_the_wait_is_bounded(starts: Made) -> None:
    one = starts(queue_timeout="100ms")
    assert error(one.http.post(COMPLETIONS, json=body()), 503)["code"] == "queue_timeout"
    assert one.door.waiting == 0
    engine = starts.open(one)
    assert not engine.submitted


def test_keys_and_limits_hold(starts: Made, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a secret-a\nb secret-b\n")
    (tmp_path / "limits").write_text("keys:\n  a: {queue_share: 0.5}\n")
    one = starts(
        api_key_file=str(tmp_path / "keys"), limits=str(tmp_path / "limits"), admin_key=("boss",),
        protect_metrics=True, max_num_queued_reqs=4, allowed_origins=(PAGE,),
    )  # fmt: skip
    a, b, admin = ({"Authorization": f"Bearer {key}"} for key in ("secret-a", "secret-b", "boss"))
    for path in ("/v1/models", "/metrics", "/load"):
        assert error(one.http.get(path), 401)["type"] == "authentication_error"
    assert error(one.http.post(COMPLETIONS, json=body()), 401)["code"] == "invalid_api_key"
    assert error(one.http.get("/server_info", headers=a), 401)["code"] == "invalid_admin_key"
    assert one.http.get("/v1/models", headers=a).status_code == one.http.get("/metrics", headers=b).status_code == 200
    assert one.http.get("/health").status_code == 503 and one.http.get("/livez").status_code == 200
    asked = [starts.ask(one, body(), headers={**a, "Origin": PAGE}) for _ in range(2)]
    waiting(one, 2)
    assert error(one.http.post(COMPLETIONS, json=body(), headers=a), 429)["code"] == "queue_share"
    asked += [starts.ask(one, body(), headers=b) for _ in range(2)]
    waiting(one, 4)
    refused = one.http.post(COMPLETIONS, json=body(), headers={**b, "Origin": PAGE})
    assert error(refused, 503)["code"] == "queue_full" and refused.headers["Access-Control-Allow-Origin"] == PAGE
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    assert one.http.options(COMPLETIONS, headers=preflight).status_code == 200
    evil = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert one.http.options(COMPLETIONS, headers=evil).status_code == 400
    starts.open(one)
    answers = [each.result() for each in asked]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert answers[0].headers["Access-Control-Allow-Origin"] == PAGE
    assert len(answers[0].headers.get_list("X-Request-Id")) == 1
    assert one.http.get("/server_info", headers=admin).status_code == 200


def test_each_client_may_use_its_part_of_the_queue(starts: Made, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a secret-a\nb secret-b\n")
    one = starts(api_key_file=str(tmp_path / "keys"), max_num_queued_reqs=2)
    a, b = ({"Authorization": f"Bearer {key}"} for key in ("secret-a", "secret-b"))
    asked = [starts.ask(one, body(), headers=a) for _ in range(2)]
    waiting(one, 2)
    assert error(one.http.post(COMPLETIONS, json=body(), headers=a), 503)["code"] == "queue_full"
    asked.append(starts.ask(one, body(), headers=b))
    waiting(one, 3)
    starts.open(one)
    assert [each.result().status_code for each in asked] == [200] * 3


def test_connections_are_bounded(starts: Made) -> None:
    one = starts(max_connections=1)
    with connect(one.url, request(body())) as connection:
        waiting(one, 1)
        assert error(httpx.get(f"{one.url}/health"), 503)["code"] == "too_many_connections"
        starts.open(one)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("end", "code", "kind"),
    [
        (lambda one: one.fail(InvalidValue("no such weights", "model")), "start_failed", InvalidValue),
        (lambda one: one.fail(JaxserveError("the engine's process ended")), "start_failed", JaxserveError),
        (lambda one: one.fail(RuntimeError("a bug")), "start_failed", RuntimeError),
        (lambda one: one.interrupt("SIGTERM"), "shutting_down", Interrupted),
        (lambda one: one.interrupt("SIGINT"), "shutting_down", Interrupted),
    ],
)
def test_a_start_that_ends_answers_what_waits(
    starts: Made, end: Callable[[Starting], None], code: str, kind: type[Exception]
) -> None:
    one = starts()
    asked = [starts.ask(one, body()) for _ in range(3)]
    unfinished = connect(one.url, request(body())[:-3])
    waiting(one, 4)
    end(one)
    for each in asked:
        assert error(each.result(), 503)["code"] == code
    assert unfinished.recv(65536).startswith(b"HTTP/1.1 503")
    unfinished.close()
    assert type(one.raised) is kind
    with pytest.raises(httpx.ConnectError):
        one.http.get("/health")


def test_signals_reach_the_service_afterwards(starts: Made, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    one = starts()
    starts.open(one, delay=0.01)
    with one.http.stream("POST", COMPLETIONS, json=body(max_tokens=40, stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        one.interrupt("SIGTERM")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in "".join(rest)
    assert one.raised is None
    assert "draining: 1 requests" in caplog.text and "uvicorn.access" not in caplog.text


# The laws of the door, without HTTP.


class Peer:
    """A client of the door: its body arrives in parts, and it may leave. `receive` blocks as uvicorn's does."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.sent = 0
        self.gone = False
        self.given = 0  # parts that an application has received
        self.status: list[int] = []
        self._more = asyncio.Event()

    def send(self) -> None:
        if not self.gone and self.sent < self.parts:
            self.sent += 1
            self._more.set()

    def leave(self) -> None:
        self.gone = True
        self._more.set()

    async def receive(self) -> dict[str, Any]:
        await self._more.wait()
        if self.gone:
            return {"type": "http.disconnect"}
        self._more.clear()
        fresh = range(self.given, self.sent)
        self.given = self.sent
        return {"type": "http.request", "body": bytes(fresh), "more_body": self.sent < self.parts}

    async def answer(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status.append(message["status"])


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["ask", "send", "leave"]), st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.sampled_from(["open", "shut"]), st.just(0), st.integers(0, 4)),
)


class Play:
    """A door with peers, and an application that reads whole bodies."""

    def __init__(self, bound: int) -> None:
        config = ServeConfig.load(max_num_queued_reqs=bound, queue_timeout="0s")
        self.door = Door(config, Keys(()), ServerStart(None, StartProgress))
        self.peers: dict[int, Peer] = {}
        self.bodies: dict[int, bytes] = {}  # that the application has got
        self.tasks: list[asyncio.Task[None]] = []
        self.over = False

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        data, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            data, more = data + message["body"], message["more_body"]
        assert scope["number"] not in self.bodies, "served twice"
        self.bodies[scope["number"]] = data
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def act(self, what: str, number: int) -> None:
        if what == "ask" and number not in self.peers:
            self.peers[number] = peer = Peer(1 + number)
            scope = {"type": "http", "path": COMPLETIONS, "method": "POST", "headers": [], "number": number}
            self.tasks.append(asyncio.ensure_future(self.door(scope, peer.receive, peer.answer)))
        elif what == "send" and number in self.peers:
            self.peers[number].send()
        elif what == "leave" and number in self.peers:
            self.peers[number].leave()
        elif what in ("open", "shut") and not self.over:
            self.over = True
            if what == "open":
                self.door.open(self.app)
            else:
                self.door.shut("over", "over")

    async def end(self) -> None:
        """Let all bodies arrive, and check what each peer has got."""
        self.act("open", 0)
        for peer in self.peers.values():
            while not peer.gone and peer.sent < peer.parts:
                peer.send()
                await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*self.tasks)
        assert self.door.waiting == 0 and self.door._bytes == 0
        for number, peer in self.peers.items():
            assert len(peer.status) == 1 or peer.gone
            assert (peer.status == [200]) == (number in self.bodies)
            assert set(peer.status) <= {200, 503}
        for number, data in self.bodies.items():
            assert data == bytes(range(1 + number)), "the body is whole and in order"


@settings(max_examples=examples(600))
@given(st.lists(ACTIONS, max_size=30), st.integers(1, 4))
def test_no_interleaving_loses_or_repeats_a_request(actions: list[tuple[str, int, int]], bound: int) -> None:
    async def play() -> None:
        made = Play(bound)
        for what, number, turns in actions:
            made.act(what, number)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert made.door.waiting <= bound
        await made.end()

    asyncio.run(play())


# Progress, and how long the last start took.


def test_progress_is_that_of_the_slowest() -> None:
    steps = [StartProgress(LAUNCHING), StartProgress.of(3, 9, "weights"), StartProgress.of(1, 248, "draw 8"),
             StartProgress.of(9, 248, "step 64"), StartProgress.of(50, 100, "measuring step times")]  # fmt: skip
    assert [one.step for one in steps] == [LAUNCHING, LOADING, WARMING, WARMING, MEASURING]
    assert [slowest(steps[at:]) for at in range(len(steps))] == steps
    assert slowest(reversed(steps)) == steps[0] and slowest(()).step == CONNECTING
    said = list(map(str, steps))
    assert said[1:3] == ["loading weights, 3 of 9 tensors", "warming up, 1 of 248 programs"]
    assert said[0] == LAUNCHING and said[4] == "measuring step times, 50 %"


def test_the_last_start_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    config = ServeConfig.load(mesh="2x1", port=1)
    assert last_start(config) is None
    remember(config, StartTime(19.25, 0))
    assert last_start(config) == last_start(ServeConfig.load(mesh="2x1", port=2, api_key=("k",))) == (19.25, 0)
    assert "about 19 s" in expectation(last_start(config))
    remember(config, StartTime(80.0, 248))
    assert last_start(config) == (80.0, 248) and "less than 80 s" in expectation(last_start(config))
    for other in ({"mesh": "4x1"}, {"mesh": "2x1", "replicas": 2}, {"mesh": "2x1", "max_num_seqs": 4}):
        assert last_start(ServeConfig.load(**other)) is None
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "17")
    assert last_start(config) is None and "the first start" in expectation(None)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "\xff", '{"seconds": "x", "compiled": 0}', '{"seconds": NaN, "compiled": 0}',
        '{"seconds": 1e999, "compiled": 0}', '{"seconds": -1, "compiled": 0}', '{"seconds": 1, "compiled": 1e999}',
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_as_no_start(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path))
    config = ServeConfig.load()
    remember(config, StartTime(3.0))
    [kept] = (tmp_path / "starts").iterdir()
    kept.write_bytes(text.encode("latin-1"))
    assert last_start(config) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", str(tmp_path / "file"))
    remember(ServeConfig.load(), StartTime(3.0))
    assert last_start(ServeConfig.load()) is None


def test_the_folder_is_the_same_before_and_after_jax_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.delenv("JAXSERVE_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir or "")
    after = cache_folder()
    monkeypatch.delitem(sys.modules, "jax")
    assert cache_folder() == after
    monkeypatch.setenv("JAXSERVE_CACHE_DIR", "/somewhere")
    assert cache_folder() == Path("/somewhere")
