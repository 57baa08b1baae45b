"""What the usage of a request with objectives says about them, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.server.objectives import Ended, outcome

HI = [{"role": "user", "content": "Hi"}]
LONG = 600_000.0  # ms: longer than any test
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
}
MEASURED = {"ttft_ms", "tpot_ms", "gap_ms"}


def streamed(live: Any, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    """Return the last usage of a stream."""
    body = {**body, "stream": True}
    if path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}
    with live.http.stream("POST", path, json=body, headers=headers) as got:
        events = [json.loads(line[6:]) for line in got.iter_lines() if line.startswith("data: {")]
    usages = [event.get("usage") or (event.get("response") or {}).get("usage") for event in events]
    return [usage for usage in usages if usage][-1]


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize(
    ("fields", "headers", "promised", "attained"),
    [
        ({"ttft_slo_ms": LONG, "tpot_slo_ms": LONG}, {}, {"ttft_slo_ms": LONG, "tpot_slo_ms": LONG}, True),
        ({"ttft_slo_ms": 1e-5, "tpot_slo_ms": LONG}, {}, {"ttft_slo_ms": 0.0, "tpot_slo_ms": LONG}, False),
        ({"ttft_slo_ms": LONG, "tbt_slo_ms": 1e-5}, {}, {"ttft_slo_ms": LONG, "tbt_slo_ms": 0.0}, False),
        ({}, {"x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "600000"}, {"tpot_slo_ms": LONG}, True),
        ({"service_tier": "interactive", "tpot_slo_ms": LONG}, {}, {"ttft_slo_ms": 1000.0}, None),
    ],
)
def test_usage_says_what_was_kept(
    plain: Any, path: str, fields: dict[str, Any], headers: dict[str, str], promised: dict[str, Any], attained: Any
) -> None:
    body = {**BODIES[path], **fields}
    whole = plain.http.post(path, json=body, headers=headers).json()["usage"]
    for usage in (whole, streamed(plain, path, body, headers)):
        slo = usage["slo"]
        assert promised.items() <= slo.items() and slo.keys() >= MEASURED
        assert min(slo[name] for name in MEASURED) >= 0 and slo["gap_ms"] >= slo["tpot_ms"] - 0.001
        assert attained is None or slo["attained"] is attained


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("fields", [{}, {"service_tier": "auto"}, {"service_tier": "best_effort"}, {"priority": 3}])
def test_others_are_told_nothing(plain: Any, path: str, fields: dict[str, Any]) -> None:
    body = {**BODIES[path], **fields}
    assert "slo" not in plain.http.post(path, json=body).json()["usage"]
    assert "slo" not in streamed(plain, path, body, {})


def ended(
    times: list[float], slo: SLO, reason: str = "stop", predicted: float | None = None, allowance: float | None = None
) -> tuple[Ended, RequestMetrics]:
    metrics = RequestMetrics(10.0, 10.0, times[0], times[-1], tuple(times), predicted=predicted, allowance=allowance)
    return Ended(0, 10.0, 5, slo, metrics.token_times, reason), metrics


def test_the_figures_are_those_of_the_worst_output() -> None:
    slo = SLO(1.0, 0.2)
    good, late = ended([10.5, 10.6, 10.9], slo, predicted=0.25), ended([11.5, 11.6], slo)
    assert outcome([good]) == {
        "ttft_slo_ms": 1000.0, "predicted_ttft_ms": 250.0, "ttft_ms": 500.0,
        "tpot_slo_ms": 200.0, "tpot_ms": 200.0, "gap_ms": 300.0, "attained": True,
    }  # fmt: skip
    both = outcome([good, late])
    assert both is not None
    assert (both["ttft_ms"], both["tpot_ms"], both["gap_ms"], both["attained"]) == (1500.0, 200.0, 300.0, False)
    assert outcome([ended([10.5, 11.5], slo, allowance=1.5)])["attained"], "stages allow more"  # type: ignore[index]
    assert outcome([ended([10.5], slo)]) == {
        "ttft_slo_ms": 1000.0, "ttft_ms": 500.0, "tpot_slo_ms": 200.0, "attained": True,
    }  # fmt: skip
    assert outcome([ended([10.5], NO_SLO)]) is None and outcome([]) is None
