"""Answers whose form needs no model, on an engine double: ids, usage, headers, metadata and the metrics' names."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server.live import MODEL

PROMPT = "def main(args):\n"
CHAT = [{"role": "user", "content": "What does os.path.join do?"}]
BODY = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}


def test_models_health_and_version(plain):
    (model,) = plain.client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 256)
    assert plain.client.models.retrieve(MODEL).id == MODEL
    assert plain.http.get("/health").status_code == 200
    assert plain.http.get("/version").json()["version"]


def test_completion(plain):
    made = plain.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8)
    (choice,) = made.choices
    assert choice.text and choice.finish_reason == "length"
    assert made.usage.completion_tokens == 8 and made.usage.prompt_tokens == len(plain.service.tokenizer.encode(PROMPT))
    assert made.usage.total_tokens == made.usage.prompt_tokens + 8
    assert made.id.startswith("cmpl-")


def test_a_stream_ends_with_done(plain):
    with plain.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert "usage" not in json.loads(lines[0][6:])


def test_objectives_reach_the_engine(plain):
    headers = {"x-llm-d-slo-ttft-ms": "1500", "x-slo-tpot-ms": "70"}
    body = {"prompt": PROMPT, "max_tokens": 2, "tpot_slo_ms": 30, "service_tier": "interactive", "priority": -3}
    made = plain.http.post("/v1/completions", json=body, headers={**headers, "X-Request-Id": "abc"})
    assert made.headers["X-Request-Id"] == "abc" and made.json()["id"] == "cmpl-abc"
    assert made.json()["service_tier"] == "interactive"
    assert plain.http.get("/health").headers["X-Request-Id"]


def test_tokenize_and_detokenize(plain):
    made = plain.http.post("/tokenize", json={"prompt": "héllo 🎉", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == 256
    assert plain.http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "héllo 🎉"}
    chat = plain.http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["count"] > made["count"]


def test_unknown_fields_are_ignored(plain, caplog):
    for _ in range(2):
        body = {"prompt": PROMPT, "max_tokens": 1, "zebra_mode": 3}
        assert plain.http.post("/v1/completions", json=body).status_code == 200
    assert sum("zebra_mode" in record.getMessage() for record in caplog.records) == 1


def test_docs_describe_the_bodies(plain):
    made = plain.http.get("/openapi.json").json()
    schema = made["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    assert "ttft_slo_ms" in made["components"]["schemas"][name]["properties"]


# Those of classes of requests are asked of a real engine, in test_classes.py and test_metrics.py.
NAMES = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "cache_config_info",
    "attention_backend_info",
    "slo_attainment",
    "instance_slack_seconds",
    "prefill_queue_seconds",
    "instance_predicted_ttft_seconds",
    "slo_violations_total",
    "predicted_step_seconds",
    "measured_step_seconds",
    "compilations_total",
    "deflections_total",
    "kv_transfer_seconds",
    "token_pacing_delay_seconds",
    "event_loop_stalls_total",
    "event_loop_stall_seconds",
    "garbage_collections_total",
    "garbage_collection_seconds",
    "iteration_tokens_total",
    "preempted_steps_total",
    "resumed_steps_total",
    "preemption_blocking_seconds",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
]


def test_names_match_vllm(plain):
    assert plain.http.post("/v1/completions", json=BODY).status_code == 200
    families = text_string_to_metric_families(plain.http.get("/metrics").text)
    names = {sample.name.removeprefix("jaxserve:") for family in families for sample in family.samples}
    assert not [name for name in NAMES if not {name, f"{name}_count"} & names]
