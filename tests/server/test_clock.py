"""The time of day may be set while a server runs: nothing that schedules, expires or counts reads it."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.timing import PATIENCE

ROOT = Path(__file__).parents[2]
WALL = re.compile(
    r"time\.(time(_ns)?|localtime|gmtime|ctime|strftime)\b|(datetime|date)\.(now|utcnow|today)\b|_REALTIME"
)
SHOWN = {  # what reads the time of day, and for what
    "jaxserve/server/service.py": "the beginning of a trace",
    "jaxserve/server/door.py": "`created` of models",
    "jaxserve/server/answers.py": "`created` of answers",
    "jaxserve/server/app.py": "`created` of models",
    "jaxserve/server/live.py": "the time of a snapshot, of events and of ended requests",
    "jaxserve/server/responses/writer.py": "`completed_at`",
    "jaxserve/engine/runtime/kv_events.py": "the time of an event, as in vLLM",
    "jaxserve/kv/direct.py": "when jax drops an offer of KV that was not fetched; it takes no other time",
    "jaxserve/bench/session.py": "the names of results",
}
JUMP = 6 * 3600.0  # seconds


def test_only_what_is_shown_is_of_the_time_of_day() -> None:
    files = [path for folder in ("sched", "jaxserve") for path in (ROOT / folder).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in files if WALL.search(path.read_text())}
    assert {path for path in readers if not path.startswith("jaxserve/sched/")} == set(SHOWN)


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A time of day that is hours earlier or later each time it is read."""
    real, steps = time.time, itertools.cycle((-JUMP, JUMP, -2 * JUMP, 3 * JUMP))
    monkeypatch.setattr(time, "time", lambda: real() + next(steps))
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + next(steps)) * 1e9))


def test_requests_are_served_while_the_clock_is_set(live: Any, jumping: None) -> None:
    body = {"prompt": "def main(", "max_tokens": 20, "ignore_eos": True, "ttft_slo_ms": 60_000, "tpot_slo_ms": 60_000}
    for session in ("s", "s", None):
        answer = live.http.post("/v1/completions", json={**body, "session_id": session}).json()
        slo = answer["usage"]["slo"]
        assert answer["usage"]["completion_tokens"] == 20
        assert slo["attained"] and 0 < slo["ttft_ms"] < PATIENCE * 1e3 and 0 <= slo["gap_ms"] < PATIENCE * 1e3, slo
    with live.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert events[-1] == "data: [DONE]" and json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
    made = live.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 16}).json()
    assert live.http.get(f"/v1/responses/{made['id']}").json()["id"] == made["id"], "it has not expired"
    text = live.http.get("/metrics").text
    for line in text.splitlines():
        if "_seconds_sum" in line and line.startswith("jaxserve:") and "predicted" not in line:  # of all tests
            assert 0 <= float(line.rpartition(" ")[2]) < PATIENCE * 1000, line
