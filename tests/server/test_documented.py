"""A valid `/openapi.json`, helpful 404 and 405 answers, and no leaked local paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator, validate

from jaxserve.config import ServeConfig


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
    ("method", "path"), [("POST", "/v1/moderations"), ("GET", "/"), ("POST", "/v1/images"), ("GET", "/v1/chat")]
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
