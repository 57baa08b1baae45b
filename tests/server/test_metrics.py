"""`/metrics` is valid, has vLLM's names, and adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.engine.runtime.info import Promise
from jaxserve.sched.api.slo import SLO
from jaxserve.server.serving import promise_line
from jaxserve.server.stats_line import StatsLine
from tests.support.server.double import Double


def scrape(live: Any) -> dict[str, float]:
    """Return the sum over all labels for each name."""
    made: dict[str, float] = {}
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        for sample in family.samples:
            made[sample.name] = made.get(sample.name, 0.0) + sample.value
    return made


def test_metrics_add_up(live):
    live.quiet()
    before = scrape(live)
    body = {"prompt": "def main(args):", "max_tokens": 6, "ignore_eos": True, "min_tokens": 6}
    made = [live.http.post("/v1/completions", json={**body, "n": n}).json() for n in (1, 2)]
    live.quiet()
    after = scrape(live)
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    prefix = "jaxserve:"
    prompt = made[0]["usage"]["prompt_tokens"]
    assert gained[prefix + "generation_tokens_total"] == 18
    assert gained[prefix + "prompt_tokens_total"] == 3 * prompt
    assert gained[prefix + "request_success_total"] == 3
    for name, count in (("time_to_first_token", 3), ("e2e_request_latency", 3), ("inter_token_latency", 15)):
        assert gained[f"{prefix}{name}_seconds_count"] == count
    assert gained[prefix + "request_time_per_output_token_seconds_count"] == 3
    assert gained[prefix + "predicted_step_seconds_count"] == gained[prefix + "measured_step_seconds_count"] > 0
    steps = gained[prefix + "steps_total"]
    assert gained[prefix + "iteration_tokens_total_count"] == steps <= gained[prefix + "iteration_tokens_total_bucket"]
    computed = gained[prefix + "computed_prompt_tokens_total"]
    assert gained[prefix + "iteration_tokens_total_sum"] >= computed + 15 > 15, "15 tokens are from decode steps"
    assert gained[prefix + "kv_transfer_seconds_count"] > 0, "2x1 transfers KV from prefill to decode"
    assert after[prefix + "num_requests_running"] == after[prefix + "num_requests_waiting"] == 0
    assert after[prefix + "kv_cache_usage_perc"] == 0
    assert after[prefix + "compilations_after_warmup_total"] == 0
    total = gained[prefix + "e2e_request_latency_seconds_sum"]
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert sum(gained[f"{prefix}{part}_seconds_sum"] for part in parts) == pytest.approx(total)


def test_the_log_line_of_statistics():
    engine = Double()
    line = StatsLine(engine)
    assert line.text(0.0) is None, "an idle engine logs nothing"
    engine._counters.generated_tokens = 100
    assert "generation 10.0 tokens/s" in str(line.text(10.0))
    assert "generation 0.0 tokens/s" in str(line.text(20.0)), "logged once when the engine becomes idle"
    assert line.text(30.0) is None


def test_load_reports_the_default_objectives(live: Any) -> None:
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


def test_an_objective_that_cannot_be_kept_is_reported_by_load_and_metrics(fake: Any) -> None:
    live = fake()
    broken = Promise(SLO(8.0, 0.001), frozenset({"ttft"}), {"tpot": "too tight"})
    live.engine.info = replace(live.engine.info, promise=broken)
    assert live.http.get("/load").json()["objectives"]["tpot"] == {
        "seconds": 0.001, "auto": False, "attainable": False, "reason": "too tight",
    }  # fmt: skip
    assert 'objective="tpot"} 0.0' in live.http.get("/metrics").text
