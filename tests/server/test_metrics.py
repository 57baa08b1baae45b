"""`/metrics` is valid, has vLLM's names, and adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.engine.runtime.info import Promise
from jaxserve.sched.api.slo import SLO
from jaxserve.server.serving import promise_line
from jaxserve.server.stats_line import StatsLine
from tests.support.server.double import Double


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
