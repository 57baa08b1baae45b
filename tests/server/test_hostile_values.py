"""Valid JSON with values that cannot be served, such as lone surrogates, infinities and megabytes, gets a 400."""

from __future__ import annotations

import json
from typing import Any

import pytest

HALF = "\ud800"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TEXT = {"prompt": "x", "max_tokens": 1}


def refused(live: Any, path: str, body: Any, status: int = 400, **more: Any) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = live.http.post(path, content=content, **more)
    assert answer.status_code == status, (path, answer.status_code, answer.text[:300])
    assert live.http.post("/v1/completions", json=TEXT).status_code == 200
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": HALF}, "prompt"),
        ("/v1/completions", {"prompt": ["x", f"a{HALF}"]}, "prompt"),
        ("/v1/completions", {**TEXT, "stop": [HALF]}, "stop"),
        ("/v1/completions", {**TEXT, "request_id": HALF, "stream": True}, "request_id"),
        ("/v1/completions", {**TEXT, "stage_slo": {HALF: {"tpot_slo_ms": 5}}}, "stage_slo"),
        ("/v1/completions", {**TEXT, "model": HALF}, "model"),
        ("/v1/completions", {**TEXT, "service_tier": HALF}, "service_tier"),
        ("/v1/completions", {**TEXT, "cache_salt": HALF}, "cache_salt"),
        ("/v1/completions", {**TEXT, HALF: 1}, None),
        ("/v1/completions", HALF, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": HALF, "content": "x"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": HALF}]}]}, "messages"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {HALF: HALF}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\udfff\ud800"}]}, "messages"),
        ("/detokenize", {"tokens": [5], "model": HALF}, "model"),
    ],
)
def test_lone_surrogates_are_refused(plain, path, body, param):
    error = refused(plain, path, body)
    assert error["param"] == param and "surrogate" in error["message"]


def test_invalid_utf8_is_refused_and_surrogate_pairs_are_not(plain):
    for raw in (b"\xed\xa0\x80", b"\xff", b"\xc3"):
        assert "UTF-8" in refused(plain, "/v1/completions", b'{"prompt": "' + raw + b'"}')["message"]
    for raw in (b"\\ud83c\\udf89", "🎉".encode(), b"\\\\ud800"):
        body = b'{"prompt": "' + raw + b'", "max_tokens": 1}'
        assert plain.http.post("/v1/completions", content=body).status_code == 200
    with_mark = b"\xef\xbb\xbf" + json.dumps(TEXT).encode()
    assert plain.http.post("/v1/completions", content=with_mark).status_code == 200


@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", "NaN", "Infinity", '"inf"', '"nan"', "1e13", "1e300", "0", "1e-9", "-5"]
)
@pytest.mark.parametrize("name", ["ttft_slo_ms", "tpot_slo_ms", "tbt_slo_ms", "stage_slo"])
def test_objectives_are_positive_and_finite(plain, name, value):
    given = f'{{"answer": {{"tpot_slo_ms": {value}}}}}' if name == "stage_slo" else value
    error = refused(plain, "/v1/completions", f'{{"prompt": "x", "max_tokens": 1, "{name}": {given}}}'.encode())
    assert error["param"] is None or error["param"].startswith(name)
    assert len(plain.engine.submitted) == 1, "only the valid request has reached the engine"


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e999", "1e13", "soon", "-1", "x" * 5000, "9" * 5000])
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
def test_objectives_in_headers_are_checked(plain, name, value):
    assert refused(plain, "/v1/completions", TEXT, headers={name: value})["param"] == name


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_infinite_numbers_are_refused(plain, name):
    refused(plain, "/v1/completions", f'{{"prompt": "x", "{name}": 1e999}}'.encode())
    refused(plain, "/v1/completions", f'{{"prompt": "x", "logit_bias": {{"5": 1e999}}, "{name}": 1}}'.encode())


LONG, DIGITS = "Q" * 5000, 9 * 10**4000
COUNTS = ("max_tokens", "min_tokens", "top_k", "n", "best_of", "logprobs", "prompt_logprobs", "priority")
FIELDS: list[tuple[str, Any]] = [
    *((name, LONG) for name in ("model", "service_tier", "request_id", "cache_salt", "temperature")),
    *((name, DIGITS) for name in COUNTS),
    *(("stage_slo", {LONG: value}) for value in ({"tpot_slo_ms": 5}, {"tpot_slo_ms": -5}, {LONG: LONG})),
    *(("logit_bias", value) for value in ({LONG: 1}, {LONG: LONG}, {str(number): 0 for number in range(4000)})),
    *(("prompt", value) for value in ([DIGITS], {LONG: 1}, [LONG, 1, {LONG: 1}])),
    *(("stop_token_ids", value) for value in ([DIGITS], [5] * 5000)),
    ("stop", [LONG]),
    ("stream_options", {LONG: 1}),
]
MESSAGES: list[Any] = [
    {"role": LONG, "content": "x"}, {"role": DIGITS, "content": "x"}, {"role": "user", "content": {LONG: 1}},
    {"role": "user", "content": [{"type": LONG}]}, LONG,
]  # fmt: skip
HUGE: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {**TEXT, name: value}) for name, value in FIELDS),
    *(("/v1/chat/completions", {"messages": [one]}) for one in MESSAGES),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": DIGITS}),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": -DIGITS}),
    *(("/detokenize", body) for body in ({"tokens": [DIGITS]}, {"tokens": [5], LONG: HALF}, {"tokens": [LONG]})),
    *(("/v1/admin/roles", body) for body in ({"roles": [LONG]}, {"instance": DIGITS, "role": LONG})),
]


def test_refusals_repeat_at_most_200_characters(fake):
    live = fake(config={"admin_key": ("boss",)})
    for path, body in HUGE:
        content = json.dumps(body).encode()
        answer = live.http.post(
            path, content=content, headers={"Authorization": "Bearer boss", "Content-Type": "application/json"}
        )
        what = f"{path} {content[:80]!r}: {answer.status_code} {answer.text[:400]}"
        assert answer.status_code in (400, 404) or (answer.status_code == 200 and b"stream_opt" not in content), what
        assert "Q" * 201 not in answer.text and "0" * 201 not in answer.text and len(answer.text) < 1500, what
    assert live.http.get(f"/v1/models/{LONG}").text.count("Q") <= 200
    assert live.http.get(f"/{LONG}").text.count("Q") <= 200
