"""Probes, what is told about a server and its load, the prefix cache, CORS, and metrics under another prefix."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from jaxserve.engine.runtime.classes import Tallies
from jaxserve.engine.runtime.info import Promise
from jaxserve.engine.runtime.profiler import Profiler
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.server.serving import promise_line
from jaxserve.server.stats_line import StatsLine
from tests.support.server.double import Double
from tests.support.server.live import Live

BODY = {"prompt": "def main(", "max_tokens": 5, "n": 2}
BOSS = {"Authorization": "Bearer boss"}
PAGE = "https://chat.example.com"


def counted(live: Live, name: str) -> dict[str, float]:
    """Return the samples of a metric without labels but `le`, by their suffix and bound."""
    found = [one for one in live.samples() if one.name.startswith(name)]
    return {one.name.removeprefix(name) + one.labels.get("le", ""): one.value for one in found}


def test_probes_tell_a_draining_server_from_a_dead_one(fake):
    live = fake(config={"api_key": ("sesame",), "protect_metrics": True})
    ready, alive = ("/health", "/readyz", "/ping"), "/livez"
    for path in (*ready, alive):
        head = live.http.head("/health" if path == "/ping" else path)
        assert live.http.get(path).status_code == head.status_code == 200 and not head.content
    assert live.http.post("/ping").status_code == 200
    live.service.draining = True
    for path in ready:
        assert live.http.get(path).json()["error"]["code"] == "shutting_down"
    assert live.http.get(alive).status_code == 200, "a draining server must not be killed"
    live.service.draining = False
    live.engine.healthy = False
    for path in (*ready, alive):  # the engine is in this process, which only a restart helps
        assert live.http.get(path).status_code == 503
        assert live.http.get(path).json()["error"]["code"] == "unhealthy"
    assert live.http.head("/health").status_code == 503


def test_livez_stays_while_an_engine_elsewhere_starts_again(live, monkeypatch):
    """The fixture's engine counts as one in another process, which starts again by itself."""
    monkeypatch.setattr(type(live.service.engine), "ailment", property(lambda _: "the engine process has ended"))
    from jaxserve.server import operations

    monkeypatch.setattr(operations, "Replicas", type(live.service.engine))
    assert live.http.get("/readyz").status_code == 503
    assert live.http.get("/livez").status_code == 200


@pytest.fixture(scope="module")
def keyed(fakes) -> Live:
    return fakes(config={"api_key": ("sesame",), "admin_key": ("boss",), "max_model_len": 200})


def test_server_info_is_for_administrators_and_has_no_keys(keyed, plain):
    live = keyed
    assert live.http.get("/server_info").status_code == 401
    assert live.http.get("/server_info", headers={"Authorization": "Bearer sesame"}).status_code == 401
    text = live.http.get("/server_info", headers=BOSS).text
    told = json.loads(text)
    assert told["settings"]["max_model_len"] == 200 and told["settings"]["policy"] == "unified"
    assert told["engine"]["instances"] == [
        {"name": "i0", "role": "mixed", "devices": ["cpu:0"], "pages": 64, "page_size": 16}
    ]
    assert told["system"]["packages"]["jax"]
    assert "sesame" not in text and "boss" not in text and "api_key" not in told["settings"]
    assert plain.http.get("/server_info").json()["error"]["code"] == "admin_off"


def test_tokenizer_info_is_what_a_remote_tokenizer_needs(fake, tokenizer):
    """lm-eval with tokenizer_backend=remote reads tokens and the template, then asks /tokenize and /detokenize."""
    live = fake(config={"api_key": ("sesame",)})
    assert live.http.get("/tokenizer_info").status_code == 401
    live.http.headers["Authorization"] = "Bearer sesame"
    text = live.http.get("/tokenizer_info").text
    told = json.loads(text)
    assert told["eos_token"] == tokenizer.hf.eos_token and told["bos_token"] == tokenizer.hf.bos_token
    assert told["chat_template"] == tokenizer.hf.chat_template and told["model_max_length"] == 2048
    assert "/demo/model" not in text, "a path of this machine"
    asked = live.http.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": False}).json()
    assert asked["tokens"] == [tokenizer.hf.eos_token_id]
    assert live.http.post("/detokenize", json={"tokens": asked["tokens"]}).json()["prompt"] == told["eos_token"]


def test_the_prefix_cache_is_reset_by_administrators_when_idle(keyed, monkeypatch):
    live, idle = keyed, True
    monkeypatch.setattr(live.engine, "reset_prefix_cache", lambda: idle, raising=False)
    assert live.http.post("/reset_prefix_cache", json={}).status_code == 401
    assert live.http.post("/reset_prefix_cache", json={}, headers=BOSS).json()["reset"] is True
    idle = False
    refused = live.http.post("/reset_prefix_cache", json={}, headers=BOSS)
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "busy"


def test_pages_of_allowed_origins_may_call(fake):
    live = fake(config={"allowed_origins": (PAGE,), "allowed_methods": ("POST",), "api_key": ("sesame",)})
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    asked = live.http.options("/v1/completions", headers={"Origin": PAGE, **asks})
    assert asked.status_code == 200 and asked.headers["Access-Control-Allow-Origin"] == PAGE
    assert "authorization" in asked.headers["Access-Control-Allow-Headers"].lower()
    for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
        refused = live.http.post("/v1/completions", json=BODY, headers={"Origin": origin})
        assert refused.status_code == 401, "keys are still needed"
        assert refused.headers.get("Access-Control-Allow-Origin") == allowed
    assert live.http.options("/v1/completions", headers={"Origin": "https://evil.example", **asks}).status_code == 400
    asks["Access-Control-Request-Method"] = "DELETE"
    assert live.http.options("/v1/completions", headers={"Origin": PAGE, **asks}).status_code == 400


def test_no_page_may_call_by_default(plain):
    answer = plain.http.post("/v1/completions", json=BODY, headers={"Origin": PAGE})
    assert answer.status_code == 200 and not [name for name in answer.headers if name.startswith("access-control")]


def test_json_lists_of_vllm(fake):
    live = fake(config={"allowed_origins": ('["*"]',), "allowed_headers": ('["authorization"]',)})
    assert live.http.get("/health", headers={"Origin": PAGE}).headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("prefix", ["vllm:", "my_"])
def test_every_metric_has_the_prefix(fake, prefix):
    live = fake(config={"metrics_prefix": prefix})
    live.http.post("/v1/completions", json=BODY)
    families = {one.name for one in live.samples()}
    assert not {name for name in families if not name.startswith((prefix, "process_"))}
    assert f"{prefix}client_requests_total" in families and f"{prefix}num_requests_running" in families
    assert counted(live, f"{prefix}prompt_tokens")["_total"] > 0


def test_what_requests_ask_for_is_counted_as_in_vllm(fake):
    live = fake()
    for _ in range(2):
        assert live.http.post("/v1/completions", json=BODY).status_code == 200
    live.http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 7})
    live.quiet()
    n, most = counted(live, "jaxserve:request_params_n"), counted(live, "jaxserve:request_params_max_tokens")
    assert n["_count"] == most["_count"] == 4 and n["_sum"] == 2 * 2 + 2 * 1 and most["_sum"] == 2 * 5 + 2 * 7
    assert n["_bucket1.0"] == 2 and n["_bucket2.0"] == 4
    longest = counted(live, "jaxserve:request_max_num_generation_tokens")
    assert longest["_count"] == 4 and longest["_sum"] == 2 * 5 + 2 * 7
    assert counted(live, "jaxserve:request_generation_tokens")["_count"] == 6


def test_probes_are_routes(fake, repo: Path):
    """The health checks of compose.yaml and of the image succeed against a server, and fail while it drains."""
    live = fake()
    check = yaml.safe_load((repo / "compose.yaml").read_text())["services"]["jaxserve"]["healthcheck"]["test"]
    text = (repo / "deploy" / "Dockerfile").read_text()
    (image,) = re.findall(r"HEALTHCHECK[^\[]*(\[.*\])", text)
    assert check[:3] == ["CMD", "python", "-c"] and json.loads(image) == check[1:]
    code = check[3].replace("http://127.0.0.1:8000", live.url)
    assert code != check[3]
    for draining in (False, True):
        live.service.draining = draining
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ)
        assert (ran.returncode != 0) is draining, ran.stderr


def test_profiles_need_a_folder_and_an_admin_key(fake, keyed, tmp_path: Path):
    refused = keyed.http.post("/start_profile", json={}, headers=BOSS)
    assert refused.status_code == 403 and "--profile-dir" in refused.json()["error"]["message"]
    live = fake(config={"admin_key": ("boss",), "profile_dir": str(tmp_path)})
    asked: list[bool] = []
    live.engine.profile = asked.append
    assert live.http.post("/start_profile", json={}).status_code == 401
    assert live.http.post("/start_profile", json={}, headers=BOSS).json() == {
        "object": "profile", "running": True, "folder": str(tmp_path),
    }  # fmt: skip
    assert live.http.post("/stop_profile", json={}, headers=BOSS).json()["running"] is False
    assert asked == [True, False]


def test_an_engine_in_another_process_writes_a_trace(live, engine, tmp_path: Path, monkeypatch):
    """Over the connection, as a front asks; the trace has host events and is one that Perfetto reads."""
    monkeypatch.setattr(engine, "_profiler", Profiler(str(tmp_path / "profiles")))
    monkeypatch.setattr(
        live.service, "config", dataclasses.replace(live.service.config, profile_dir=str(tmp_path / "profiles"))
    )
    boss = {"Authorization": "Bearer boss"}

    def post(path: str) -> httpx.Response:
        return live.http.post(path, json={}, headers=boss)

    early = post("/stop_profile")
    assert early.status_code == 400 and "no profile is being taken" in early.json()["error"]["message"]
    assert post("/start_profile").status_code == 200
    twice = post("/start_profile")
    assert twice.status_code == 400 and "already" in twice.json()["error"]["message"]
    live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert post("/stop_profile").status_code == 200
    (found,) = (tmp_path / "profiles").rglob("perfetto_trace.json.gz")
    trace = json.loads(gzip.decompress(found.read_bytes()))
    assert len(trace["traceEvents"]) > 10


def test_gateways_cannot_name_tiers_that_the_client_may_not_use(fake, tmp_path: Path):
    (tmp_path / "limits.yaml").write_text("default: {tiers: [batch]}\n")
    live = fake(config={"api_key": ("sesame",), "limits": str(tmp_path / "limits.yaml")})
    for named in ("interactive", "batch"):
        headers = {"Authorization": "Bearer sesame", "x-gateway-inference-objective": named}
        assert live.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        used = "batch" if named == "batch" else "standard"
        assert live.engine.submitted[-1].slo == live.service.config.tier(used).slo


@pytest.mark.parametrize("header", ["x-gateway-inference-objective", "x-llm-d-inference-objective"])
def test_gateways_name_tiers_as_objectives(plain, header):
    for named, body, tier in (
        ("interactive", {}, "interactive"),
        ("someone-elses", {}, "standard"),
        ("interactive", {"service_tier": "batch"}, "batch"),
    ):
        assert plain.http.post("/v1/completions", json={**BODY, **body}, headers={header: named}).status_code == 200
        config = plain.service.config
        assert plain.engine.submitted[-1].slo == config.tier(tier).slo, named


def test_the_log_line_of_statistics():
    engine = Double()
    line = StatsLine(engine)
    assert line.text(0.0) is None, "an idle engine logs nothing"
    engine._counters.generated_tokens = 100
    assert "generation 10.0 tokens/s" in str(line.text(10.0))
    assert "generation 0.0 tokens/s" in str(line.text(20.0)), "logged once when the engine becomes idle"
    assert line.text(30.0) is None


def test_the_log_line_has_the_attainment_of_its_own_time() -> None:
    """A share over the time since the start would hide that a server has begun to be late."""
    engine, tallies = Double(), Tallies(["chat", "night", BEST_EFFORT])
    stats = engine.stats()
    engine.stats = lambda: dataclasses.replace(stats, classes=tallies.stats(), by_prompt=tallies.by_prompt())

    def end(class_: str, ttft: float, prompt: int = 5) -> None:
        request = Request(0, NewRequest([1] * prompt, SamplingParams(), SLO(2.0)), 0.0, class_=class_)
        request.pending, request.finish_reason = 1, "length"
        request.gain(1, ttft)
        tallies.add(request, None)
        engine._counters.generated_tokens += 1

    line = StatsLine(engine)
    line.text(0.0)
    for class_, ttft in (("chat", 1.0), ("chat", 3.0), ("night", 1.0), ("night", 1.0), (BEST_EFFORT, 3.0)):
        end(class_, ttft)
    assert "SLO attained 75.0% of 4 (chat 50.0%, night 100.0%, best_effort 0.0%)" in str(line.text(10.0))
    for prompt in (5, 9_000):
        end("chat", 1.0 if prompt == 5 else 3.0, prompt)
    assert "SLO attained 50.0% of 2 (<4K 100.0%, 4-16K 0.0%)" in str(line.text(20.0))


def test_load_reports_the_default_objectives(live) -> None:
    live.quiet()
    load, promise = live.http.get("/load").json(), live.engine.info.promise
    assert load["server_load"] == load["running"] == load["waiting"] == 0, "no request runs"
    assert load["objectives"] == {
        "ttft": {"seconds": promise.slo.ttft, "auto": True, "attainable": True},
        "tpot": {"seconds": promise.slo.tpot, "auto": True, "attainable": True},
    }
    assert [one["name"] for one in load["instances"]] == ["prefill-0", "decode-1"]
    for one in load["instances"]:
        assert one["prefill_budget_tokens"]["default"] > 0 == one["prefill_queue_seconds"]
        assert one["slack_seconds"] is None and one["predicted_ttft_seconds"] > 0, "nothing runs"
    text = live.http.get("/metrics").text
    assert 'jaxserve:prefill_budget_tokens{engine="prefill-0",model_name="jaxserve-demo",slo_class="default"}' in text
    assert f'jaxserve:slo_seconds{{model_name="jaxserve-demo",objective="tpot"}} {promise.slo.tpot}' in text
    assert 'jaxserve:slo_attainable{model_name="jaxserve-demo",objective="tpot"} 1.0' in text
    assert f"{promise.slo.tpot:g} s per token after it (auto)" in promise_line(promise)


def test_an_objective_that_cannot_be_kept_is_reported_by_load_and_metrics(fake) -> None:
    live = fake()
    broken = Promise(SLO(8.0, 0.001), frozenset({"ttft"}), {"tpot": "too tight"})
    live.engine.info = dataclasses.replace(live.engine.info, promise=broken)
    assert live.http.get("/load").json()["objectives"]["tpot"] == {
        "seconds": 0.001, "auto": False, "attainable": False, "reason": "too tight",
    }  # fmt: skip
    assert 'objective="tpot"} 0.0' in live.http.get("/metrics").text
