"""The dashboard of a recorded run: snapshots that agree with the simulation, and a server for this machine only."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.cli.main import main
from jaxserve.errors import InvalidValue
from jaxserve.report.recorded_run import SNAPSHOTS, present_run
from jaxserve.report.recorded_server import RecordedServer
from jaxserve.sched.recorded.explain import explain
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.sim import Report, simulate
from tests.support.sched.harness import Job
from tests.support.sched.presets import CHAT, TINY
from tests.support.sched.recorded import recorded as recorded_journal
from tests.support.timing import PATIENCE


def recorded(mesh: str = "4x1", policy: str = "kairos", requests: int = 60) -> tuple[Recorder, Report]:
    recorder = Recorder(slack=True)
    return recorder, simulate(CHAT, policy, mesh, TINY, qps=60, num_requests=requests, recorder=recorder)


@contextmanager
def served(recorder: Recorder) -> Iterator[httpx.Client]:
    with RecordedServer(recorder, "a run", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
                yield http
        finally:
            server.shutdown()
            thread.join()


def test_snapshots_agree_with_the_simulation() -> None:
    recorder, report = recorded()
    snapshots: list[dict[str, Any]] = json.loads(json.dumps(present_run(recorder, "a run"), allow_nan=False))[
        "snapshots"
    ]
    assert len(snapshots) == SNAPSHOTS
    times = [one["time"] for one in snapshots]
    assert times[0] == 0 and times == sorted(times)
    assert sorted(one["id"] for shot in snapshots for one in shot["requests"]) == sorted(map(str, recorder.requests))
    moves = [one for shot in snapshots for one in shot["events"] if one["kind"] == "move"]
    assert len(moves) == len(recorder.moves) == snapshots[-1]["counts"]["moves"]
    for before, shot in pairwise(snapshots):
        assert all(before["time"] - 1e-6 <= one["ended"] <= shot["time"] + 1e-6 for one in shot["requests"])
    last = snapshots[-1]
    assert last["counts"]["requests"] == len(report.measured)
    [shares] = last["classes"].values()
    assert shares["waiting"] == shares["running"] == 0
    if last["time"] <= 60:
        assert shares["attainment"] == pytest.approx(report.summary.attained, abs=1e-4)
    tokens = sum(
        shot["rates"]["generated_tokens"] * (shot["time"] - before["time"]) for before, shot in pairwise(snapshots)
    )
    assert tokens == pytest.approx(sum(one.output for one in report.measured), rel=0.02)
    assert any(one["step"] for shot in snapshots for one in shot["instances"])
    predicted = [one["predicted_ttft"] for shot in snapshots for one in shot["requests"]]
    accuracy = report.ttft_predictions.values()
    assert sum(one is not None for one in predicted) >= sum(one.count for one in accuracy) > 0
    assert any(shot["ttft"]["predicted"] for shot in snapshots)
    instances = [one for shot in snapshots for one in shot["instances"]]
    assert any(one["slack"] is not None and one["running"] for one in instances)
    assert any(one["backlog_tokens"] for one in instances)


def test_it_has_the_form_of_the_feed(plain_snapshot: dict[str, Any]) -> None:
    recorder, _ = recorded(requests=20)
    shot = present_run(recorder, "a run")["snapshots"][-1]
    assert shot.keys() == plain_snapshot.keys()
    assert shot["instances"][0].keys() == plain_snapshot["instances"][0].keys()
    for name in ("server", "rates", "ttft"):
        assert shot[name].keys() == plain_snapshot[name].keys(), name
    assert next(iter(shot["classes"].values())).keys() == next(iter(plain_snapshot["classes"].values())).keys()


@pytest.fixture
def plain_snapshot() -> dict[str, Any]:
    """A snapshot of a server."""
    from jaxserve.engine.runtime.info import Stats
    from jaxserve.server.snapshot import Reading, snapshot
    from tests.support.server.double import Double

    double = Double()
    stats = double.stats()
    reading = Reading(1e9, 1.0, stats, Stats((), stats.counters), (), (), ())
    made = snapshot(reading, double.info, "model")
    empty = {"waiting": 0, "running": 0, "ended": 0, "attainment": None, "ttft_slack": None, "tpot_slack": None}
    return {**made, "classes": made["classes"] or {"default": empty}}


def test_the_page_and_its_data_are_served() -> None:
    recorder, _ = recorded()
    with served(recorder) as http:
        page = http.get("/")
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
        assert http.get("/dashboard/player.js").status_code == 200
        assert http.get("/dashboard/about.json").json()["recorded"] == {"title": "a run"}
        assert len(http.get("/dashboard/run.json").json()["snapshots"]) == SNAPSHOTS
        listed = http.get("/v1/requests?limit=200").json()["data"]
        assert len(listed) == len(recorder.requests)
        id = listed[0]["id"]
        assert http.get(f"/v1/requests/{id}").json()["lines"] == explain(recorder, int(id))
        for path in ("/v1/requests/9999", "/v1/requests/x", "/v1/live", "/dashboard/../timeline.py", "/etc/passwd"):
            assert http.get(path).status_code == 404


def test_pages_elsewhere_cannot_read_it() -> None:
    recorder, _ = recorded(requests=5)
    with served(recorder) as http:
        assert http.get("/", headers={"Host": "evil.example:80"}).status_code == 403
        assert "access-control-allow-origin" not in http.get("/dashboard/run.json").headers


def test_every_answer_has_the_policy() -> None:
    recorder, _ = recorded(requests=5)
    with served(recorder) as http:
        for method, path, status in (("HEAD", "/", 200), ("POST", "/", 501), ("GET", "/" + "x" * 60_000, 404)):
            answer = http.request(method, path)
            assert answer.status_code == status and answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert http.head("/").text == "" and "error" in http.post("/").json()


def test_a_browser_that_leaves_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    recorder, _ = recorded(requests=60)
    with served(recorder) as http:
        with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as left:
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            left.sendall(b"GET /dashboard/run.json HTTP/1.1\r\nHost: localhost:1\r\n\r\n")
            assert left.recv(1)
        assert http.get("/").status_code == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_port_in_use_is_named() -> None:
    recorder, _ = recorded(requests=5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidValue, match=f"dashboard={port} .*another port"):
            RecordedServer(recorder, "a run", port)


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--qps", "2,3"], "--dashboard need a single simulation"), (["--qps", "2"], "dashboard=70000 must be a port")],
)
def test_what_cannot_be_shown_is_refused(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = "70000" if "port" in said else "0"
    assert main(["simulate", "--policy", "distserve", *more, "--num-requests", "5", "--dashboard", port]) != 0
    assert said in capsys.readouterr().err


def test_a_journal_is_shown_like_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job(range(1000 * i, 1000 * i + 5 + i % 9), 4 + i % 5, i * 0.01) for i in range(30)]
    (tmp_path / "run.jsonl").write_text(recorded_journal(jobs, "4x1", "kairos"))
    runs = []

    def interrupted(server: RecordedServer) -> None:
        run, listed = server.file("/dashboard/run.json"), server.file("/v1/requests")
        assert run is not None and listed is not None
        runs.append((json.loads(run.body)["snapshots"], json.loads(listed.body)["data"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordedServer, "serve_forever", interrupted)
    assert main(["replay", str(tmp_path / "run.jsonl"), "--no-simulate", "--dashboard", "0"]) == 0
    [(snapshots, listed)] = runs
    assert len(listed) == len(jobs) and all(one["output_tokens"] > 0 for one in listed)
    assert snapshots[0]["time"] == 0 and {one["role"] for one in snapshots[0]["instances"]} == {"prefill", "decode"}
    assert sum(len(shot["requests"]) for shot in snapshots) == len(jobs)
    assert all(one["predicted_ttft"] is not None for one in listed)
    assert any(shot["ttft"]["predicted"] is not None for shot in snapshots)
    assert "the dashboard is at" in capsys.readouterr().out


def test_a_simulation_is_shown_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(server: RecordedServer) -> None:
        assert server.file("/dashboard/run.json") is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordedServer, "serve_forever", interrupted)
    assert main(["simulate", "--policy", "distserve", "--qps", "2", "--num-requests", "5", "--dashboard", "0"]) == 0
    assert "the dashboard is at http://127.0.0.1:" in capsys.readouterr().out
