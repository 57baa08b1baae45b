"""The feed of snapshots and the lists of requests: what is in them, who sees what, and what viewers cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import httpx
import pytest

from jaxserve.engine.runtime.flight_recorder import EndedRequest, Event, Recent, RequestLife
from jaxserve.engine.runtime.step_record import Step
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.recorded.record import Placed
from jaxserve.server import live as feed
from tests.support.server.live import Live, connect
from tests.support.timing import until

HISTORY = Recent(
    4,
    (
        Event(1, 0.4, "stop", "i0"),
        Event(3, 0.1, "deflection", "i0", 7, "alice"),
    ),
    (
        EndedRequest(2, 3.0, 6, "cmpl-6", "bob", "default", "standard", 30, 4, 0.1, 0.4, 0.02, 0.5, 0.1, 0.3, True,
                     "stop"),
        EndedRequest(4, 2.0, 7, "cmpl-7", "alice", "default", "standard", 20, 4, 0.2, 0.9, 0.02, 0.5, inf, 0.6, False,
                     "length"),
    ),
)  # fmt: skip
LIFE = RequestLife(
    7, "cmpl-7", "alice", "default", "standard", SLO(0.5, 0.1), 10.0, 20, 0, 0, (10.9, 10.92), 10.9, "length", None,
    None, 0.6, (Step("i0", 10.0, 10.6, False, ((6, 0, 30, True),), b"", b"", 0),
                Step("i0", 10.6, 10.9, False, ((7, 0, 20, True),), b"", b"", 0)),
    (Placed(10.0, "i0", 7, 1, 30),), (), {6: 30, 7: 20}, (6,),
)  # fmt: skip
KEYS = "alice apple\nbob banana\n"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD", 0.01)


def recorded(made: Live) -> Live:
    made.engine.history, made.engine.lives = HISTORY, {7: LIFE}
    return made


@pytest.fixture(scope="module")
def plainly(fakes: Callable[..., Live]) -> Live:
    return recorded(fakes())


@pytest.fixture
def server(plainly: Live) -> Live:
    """A server that its tests share, as long as they do not end it or leave connections."""
    until(lambda: plainly.service.live.idle)
    plainly.engine.submitted.clear()
    return plainly


@pytest.fixture
def own(fake: Callable[..., Live]) -> Live:
    return recorded(fake())


@pytest.fixture(scope="module")
def shared(fakes: Callable[..., Live], tmp_path_factory: pytest.TempPathFactory) -> Live:
    """A server with the keys of two clients."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    return recorded(fakes({"api_key_file": str(keys)}))


def key(word: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {word}"}


@contextmanager
def snapshots(server: Live, headers: dict[str, str] | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """Open a stream; yields an iterator over its snapshots."""
    with server.http.stream("GET", "/v1/live", headers=headers or {}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def test_a_snapshot_says_what_the_server_does(own: Live) -> None:
    with snapshots(own) as found:
        first, second = next(found), next(found)
    assert first["server"]["policy"] == "fcfs" and first["server"]["model"] == "jaxserve-demo"
    [instance] = first["instances"]
    assert instance["name"] == "i0" and instance["pages"] == 64 and instance["step"] is None
    assert first["classes"]["default"] == {
        "waiting": 0, "running": 0, "ended": 2, "attainment": 0.5, "ttft_slack": -0.15, "tpot_slack": 0.08,
    }  # fmt: skip
    assert first["ttft"] == {"predicted": 0.45, "measured": 0.65, "requests": 2}
    assert [event["kind"] for event in first["events"]] == ["stop", "deflection"]
    assert first["events"][1]["request"] == "7"
    assert [one["id"] for one in first["requests"]] == ["6", "7"]
    assert first["rates"]["requests"] is None and second["rates"]["requests"] == 0
    assert not second["events"] and not second["requests"], "they were in the snapshot before"
    assert second["classes"]["default"]["ended"] == 2, "lately"


def test_a_viewer_that_comes_later_gets_what_happened_meanwhile(server: Live) -> None:
    with snapshots(server) as found:
        next(found)
    with snapshots(server) as found:
        again = next(found)
    assert again["classes"]["default"]["ended"] == 2


def test_requests_are_listed_newest_first(server: Live) -> None:
    listed = server.http.get("/v1/requests").json()["data"]
    assert [one["id"] for one in listed] == ["7", "6"]
    assert listed[0]["tpot_slo"] is None and listed[0]["ttft"] == 0.9 and listed[0]["key"] == "cmpl-7"
    assert len(server.http.get("/v1/requests?limit=1").json()["data"]) == 1


def test_a_bad_limit_is_refused(server: Live) -> None:
    for limit in ("0", "501", "x", "-1", "1e2", "", "٣"):
        refused = server.http.get("/v1/requests", params={"limit": limit})
        said = refused.json()["error"]["message"]
        assert refused.status_code == 400 and "limit=" in said and "1 to 500" in said, limit


def test_a_late_request_is_explained(server: Live) -> None:
    found = server.http.get("/v1/requests/7").json()
    assert found["id"] == "7" and found["predicted_ttft"] == 0.6 and not found["attained"]
    assert found["lines"][-1].startswith("Missed TTFT by 400 ms: of 900 ms it was computed for 300 ms")
    assert [bar["kind"] for bar in found["bars"]] == ["other", "prefill"]


def test_a_request_is_named_by_the_id_of_its_answer(server: Live, shared: Live) -> None:
    by_answer, by_number = (server.http.get(f"/v1/requests/{id}").json()["lines"] for id in ("cmpl-7", "7"))
    assert by_answer == by_number
    mine, theirs = (shared.http.get("/v1/requests/cmpl-7", headers=key(one)).status_code for one in ("apple", "banana"))
    assert (mine, theirs) == (200, 404)


def test_a_long_unknown_id_is_cut_with_a_mark(server: Live) -> None:
    said = server.http.get("/v1/requests/cmpl-" + "a" * 500).json()["error"]["message"]
    assert "…" in said and len(said) < 300
    answer = "chatcmpl-" + "a" * 32
    assert repr(answer) in server.http.get(f"/v1/requests/{answer}").json()["error"]["message"]


@pytest.mark.parametrize(
    "id", ["8", "0-7", "x", "7x", "-7", "9" * 30, "٣", "1-", "%20", "²", "²-7", "7-²", "9" * 5000 + "-7"]
)
def test_an_unknown_request_is_not_found(server: Live, id: str) -> None:
    found = server.http.get(f"/v1/requests/{id}")
    assert found.status_code == 404 and found.json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize("path", ["/v1/live", "/v1/requests", "/v1/requests/7"])
def test_a_key_is_needed(shared: Live, path: str) -> None:
    for headers in ({}, key("wrong"), {"Authorization": "Basic apple"}):
        refused = shared.http.get(path, headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"


def test_a_client_sees_its_own_requests_only(shared: Live) -> None:
    alice, bob = (shared.http.get("/v1/requests", headers=key(one)).json()["data"] for one in ("apple", "banana"))
    assert [one["id"] for one in alice] == ["7"] and [one["id"] for one in bob] == ["6"]
    assert shared.http.get("/v1/requests/7", headers=key("apple")).status_code == 200
    assert shared.http.get("/v1/requests/7", headers=key("banana")).status_code == 404
    with snapshots(shared, key("apple")) as mine, snapshots(shared, key("banana")) as theirs:
        ours, other = next(mine), next(theirs)
    assert [one["id"] for one in ours["requests"]] == ["7"]
    assert ours["events"][1]["request"] == "7"
    assert "cmpl-7" not in json.dumps(other) and all(event["request"] is None for event in other["events"])
    words = " ".join(shared.http.get("/v1/requests/7", headers=key("apple")).json()["lines"])
    assert "requests of other clients" in words and "request 6" not in words


def test_the_client_of_a_request_reaches_the_engine(shared: Live) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    assert shared.http.post("/v1/completions", json=body, headers=key("banana")).status_code == 200
    assert shared.engine.submitted[-1].asked.client == "bob"


def test_no_text_is_in_what_viewers_get(server: Live) -> None:
    secret = "zebra<script>alert(1)</script>"
    server.http.post("/v1/completions", json={"prompt": secret, "max_tokens": 4})
    with snapshots(server) as found:
        seen = json.dumps(next(found))
    assert "zebra" not in seen and "zebra" not in server.http.get("/v1/requests").text


def test_a_snapshot_is_made_once_for_all_viewers(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    made, snapshot = [0], feed.snapshot

    def counted(*args: Any) -> dict[str, Any]:
        made[0] += 1
        return snapshot(*args)

    monkeypatch.setattr(feed, "snapshot", counted)
    with ExitStack() as opened, httpx.Client(base_url=own.url, timeout=60, limits=httpx.Limits()) as http:
        own.http.close()
        own.http = http
        streams = [opened.enter_context(snapshots(own)) for _ in range(50)]
        before = made[0]
        times = [{next(stream)["time"] for _ in range(5)} for stream in streams]
        assert all(len(each) == 5 for each in times)
        assert made[0] - before < 50 * 5, "fewer than one for each viewer"
    own.http = httpx.Client(base_url=own.url, timeout=60)
    until(lambda: own.service.live.idle)  # so nothing is made without viewers


def viewers(server: Live) -> int:
    return int(server.service.live.viewers)


def test_one_viewer_too_many_is_refused(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "VIEWERS", 1)
    with snapshots(server) as found:
        next(found)
        refused = server.http.get("/v1/live")
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_viewers"
    until(lambda: not viewers(server))


def test_a_viewer_that_never_reads_is_dropped(own: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    big = HISTORY._replace(requests=tuple(HISTORY.requests[0]._replace(key="k" * 1000) for _ in range(3000)))
    request = b"GET /v1/live HTTP/1.1\r\nHost: x\r\n\r\n"

    async def always(since: int) -> Recent:
        return big

    monkeypatch.setattr(own.engine, "recent", always)
    with connect(own.url, request):
        until(lambda: viewers(own) == 1)
        with snapshots(own) as found:
            next(found)
            until(lambda: next(found) and viewers(own) == 1)
            assert own.http.get("/health").status_code == 200
        until(lambda: not viewers(own))
        own.http.close()
        open_ones = own.ending._server.server_state.connections
        until(lambda: not open_ones)  # nor does its connection stay, with all that it has not read
    own.http = httpx.Client(base_url=own.url)


def test_the_end_of_the_server_ends_the_streams(own: Live) -> None:
    with snapshots(own) as found:
        next(found)
        own.call(own.ending.drain)
        assert list(found) is not None, "it ends"


def test_data_stays_in_no_cache_and_is_what_it_says(server: Live) -> None:
    for path in ("/v1/requests", "/v1/requests/7"):
        assert server.http.get(path).headers["cache-control"] == "no-store"
    for path in ("/v1/requests", "/v1/requests/<b>", "/dashboard/<b>.js", "/<b>"):
        assert server.http.get(path).headers["x-content-type-options"] == "nosniff"


def test_a_prediction_without_a_bound_is_null(own: Live) -> None:
    own.engine.lives[7] = replace(LIFE, predicted=inf)
    assert own.http.get("/v1/requests/7").json()["predicted_ttft"] is None
