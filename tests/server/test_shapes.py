"""Answers whose form needs no model, on an engine double: ids, usage, headers, metadata and the metrics' names."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server.live import MODEL

PROMPT = "def main(args):\n"
CHAT = [{"role": "user", "content": "What does os.path.join do?"}]
BODY = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}


def test_completion(plain):
    (model,) = plain.client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 256)
    made = plain.client.completions.create(model=model.id, prompt=PROMPT, max_tokens=8)
    (choice,) = made.choices
    assert choice.text and choice.finish_reason == "length"
    assert made.usage.completion_tokens == 8 and made.usage.prompt_tokens == len(plain.service.tokenizer.encode(PROMPT))
    assert made.usage.total_tokens == made.usage.prompt_tokens + 8
    assert made.id.startswith("cmpl-")


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


def test_every_metric_of_the_reference_is_exported(plain, repo: Path):
    """The page is written from the code (tests/test_docs.py), so that a name changes in both or in neither."""
    page = (repo / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?m)^\| `(jaxserve:\w+)` \|", page))
    assert plain.http.post("/v1/completions", json=BODY).status_code == 200
    families = list(text_string_to_metric_families(plain.http.get("/metrics").text))
    told = {one.name + "_total" * (one.type == "counter") for one in families}
    assert len(named) > 80 and named <= told, sorted(named - told)
