"""Requests of the real engine are recorded, listed and explained, also over several replicas."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.fleet.engine_server import EngineServer
from jaxserve.fleet.replicas import Replicas
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.slo import SLO
from jaxserve.server.live import life_of, present_requests
from tests.support.server.fronts import among
from tests.support.server.live import Live
from tests.support.timing import until

BODY = {"prompt": "def main(args):\n", "max_tokens": 8, "ignore_eos": True}


def listed(live: Live, key: str) -> dict[str, Any]:
    """Return the line of a request by the id of its answer."""

    def lines() -> list[dict[str, Any]]:
        return [one for one in live.http.get("/v1/requests").json()["data"] if one["key"] == key]

    until(lambda: lines())
    return lines()[0]


def test_a_late_request_is_explained(live: Live) -> None:
    answer = live.http.post("/v1/completions", json={**BODY, "ttft_slo_ms": 0.01}).json()
    line = listed(live, answer["id"])
    assert not line["attained"] and line["output_tokens"] == 8 and line["ttft_slo"] == 1e-5
    assert line["ttft"] * 1e3 == pytest.approx(answer["usage"]["slo"]["ttft_ms"], abs=0.01)
    found = live.http.get(f"/v1/requests/{line['id']}").json()
    assert found["lines"][-1].startswith("Missed TTFT by ") and found["first_token"] <= found["last_token"]
    kinds = {bar["kind"] for bar in found["bars"]}
    assert {"prefill", "decode", "transfer"} <= kinds, "it moved from the prefill to the decode instance"
    assert "def main" not in json.dumps(found)


def test_a_request_on_time_says_so(live: Live) -> None:
    answer = live.http.post("/v1/completions", json={**BODY, "ttft_slo_ms": 600_000, "tpot_slo_ms": 600_000}).json()
    line = listed(live, answer["id"])
    assert line["attained"] and line["finish_reason"] == "length"
    lines = live.http.get(f"/v1/requests/{line['id']}").json()["lines"]
    assert lines[-1] == "Attained both objectives." and any("decode-1 decoded it in 7 steps" in one for one in lines)


def test_the_feed_sees_the_engine_at_work(live: Live) -> None:
    with (
        live.http.stream("GET", "/v1/live") as feed,
        live.http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}) as answer,
    ):
        shots = (json.loads(line[6:]) for line in feed.iter_lines() if line.startswith("data: "))
        moved = next(shot for shot in shots if any(event["kind"] == "move" for event in shot["events"]))
        for _ in answer.iter_lines():
            pass
    assert [one["role"] for one in moved["instances"]] == ["prefill", "decode"]
    assert moved["counts"]["moves"] > 0


def test_replicas_number_their_requests(engine: Engine, tmp_path: Path) -> None:
    """Two servers of one engine stand for two replicas."""
    servers = [EngineServer(engine, b"key") for _ in range(2)]

    async def work(replicas: Replicas) -> None:
        ended = asyncio.Event()

        def heard(delta: Delta) -> None:
            if delta.finish_reason is not None:
                ended.set()

        params = SamplingParams(max_tokens=3, ignore_eos=True)
        replicas.submit(NewRequest((5, 6, 7), params, SLO(60.0, 60.0), key="mine", client="me"), heard)
        await ended.wait()
        found = [one for one in (await present_requests(replicas, None, 500))["data"] if one["key"] == "mine"]
        ids = {one["id"].split("-")[0] for one in found}
        assert ids == {"0", "1"}, "each replica lists it, since both are the same engine here"
        life = await life_of(replicas, found[0]["id"], "me")
        assert life.key == "mine" and life.steps
        assert not [one for one in (await present_requests(replicas, "you", 500))["data"] if one["key"] == "mine"]

    among(servers, tmp_path, work)
