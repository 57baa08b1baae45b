"""Answers whose form needs no model: ids, usage, the schema, names of metrics, 404 and 405, and no local paths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator, validate
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.config import ServeConfig
from tests.support.server.live import MODEL

PROMPT = "def main(args):\n"
CHAT = [{"role": "user", "content": "What does os.path.join do?"}]
BODY = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}


def refs(node: Any) -> set[str]:
    """Yield every `$ref` in a document."""
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(refs, node.values()))
    return set().union(*map(refs, node)) if isinstance(node, list) else set()


def test_the_schema_is_valid(plain):
    schema = plain.http.get("/openapi.json").json()
    validate(schema, cls=OpenAPIV31SpecValidator)
    for ref in refs(schema):
        found: Any = schema
        for part in ref.removeprefix("#/").split("/"):
            assert part in found, f"{ref} is unresolved"
            found = found[part]
    bodies = schema["components"]["schemas"]
    assert {"ChatBody", "CompletionBody", "StreamOptions", "StageSLO", "ErrorAnswer"} <= set(bodies)
    assert "cache_salt" in bodies["ChatBody"]["properties"]
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/CompletionBody") and "ttft_slo_ms" in bodies["CompletionBody"]["properties"]
    assert plain.http.get("/docs").status_code == 200


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/moderations"), ("GET", "/v2"), ("POST", "/v1/images"), ("GET", "/v1/chat")]
)
def test_unknown_routes_list_the_known_ones(plain, method, path):
    answer = plain.http.request(method, path)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_route"
    assert f"no route {method} {path} here" in message
    assert "POST /v1/chat/completions" in message and "GET /health" in message


def test_a_wrong_method_names_the_right_one(plain):
    answer = plain.http.get("/v1/completions")
    assert answer.status_code == 405 and answer.headers["Allow"] == "POST"
    assert "takes POST" in answer.json()["error"]["message"]


def test_models_show_no_path(fake, tmp_path: Path):
    folder = tmp_path / "secret-place" / "my-model"
    folder.mkdir(parents=True)
    assert ServeConfig.load(model=str(folder)).names == ("my-model",)
    assert ServeConfig.load(model="Qwen/Qwen3-8B").names == ("Qwen/Qwen3-8B",)
    live = fake(config={"model": str(folder)})
    shown = live.http.get("/v1/models").json()
    assert [one["id"] for one in shown["data"]] == ["my-model"] and "secret-place" not in json.dumps(shown)
    asked = {"prompt": "x", "max_tokens": 1}
    for model in ("my-model", str(folder)):
        assert live.http.post("/v1/completions", json={**asked, "model": model}).status_code == 200
    assert "secret-place" not in live.http.post("/v1/completions", json={**asked, "model": "other"}).text
    assert "secret-place" not in live.http.get("/metrics").text


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
    (model,) = plain.client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 256)
    chat = plain.http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["count"] > made["count"]


def test_unknown_fields_are_ignored(plain, caplog):
    for _ in range(2):
        body = {"prompt": PROMPT, "max_tokens": 1, "zebra_mode": 3}
        assert plain.http.post("/v1/completions", json=body).status_code == 200
    assert sum("zebra_mode" in record.getMessage() for record in caplog.records) == 1


def test_every_metric_of_the_reference_is_exported(plain, repo: Path):
    """The page is written from the code (tests/test_docs.py), so that a name changes in both or in neither."""
    page = (repo / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?m)^\| `(jaxserve:\w+)` \|", page))
    assert plain.http.post("/v1/completions", json=BODY).status_code == 200
    families = list(text_string_to_metric_families(plain.http.get("/metrics").text))
    told = {one.name + "_total" * (one.type == "counter") for one in families}
    assert len(named) > 80 and named <= told, sorted(named - told)
