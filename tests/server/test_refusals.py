"""Every bad request gets its status in OpenAI's error format, and the server keeps serving others."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxserve.generation.generate import GenerationFailed
from jaxserve.sched.api.errors import QueueFull, Unavailable
from jaxserve.sched.api.plan import GIVEN_UP, UNAVAILABLE
from jaxserve.server.failures import refusal, response_of
from tests.support.timing import until

GOOD = {"prompt": "def main(", "max_tokens": 3}
CHAT = [{"role": "user", "content": "x"}]
CALLED = [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]
TOOL = {"type": "function", "function": {"name": "f"}}
NOWHERE = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}
FORCED = {"tools": [TOOL], "tool_choice": "required"}
FROB = {"name": "x", "schema": {"type": "frob"}}
UNSUPPORTED = {
    "functions": [{"name": "f"}], "lora_request": {"name": "a"}, "images": ["a"], "audio": {"voice": "a"},
    "modalities": ["text", "audio"], "chat_template": "{{ 1 }}", "use_beam_search": True, "best_of": 3,
}  # fmt: skip
# A field, its value, and what is refused of it.
FIELDS = (
    ("max_tokens", "many", ""), ("max_tokens", 0, ""), ("temperature", [1], ""),
    ("temperature", -1, ""), ("top_p", 0, ""), ("n", 0, ""), ("n", 100_000, ""), ("stop", [""], ""),
    ("stop", ["a", 1], ""), ("logprobs", 21, ""), ("stop_token_ids", [10**9], ""), ("logit_bias", {"x": 1}, ""),
    ("logit_bias", {"4096": 1}, ""), ("logit_bias", {"1": 101}, ""), ("service_tier", "gold", ""),
    ("ttft_slo_ms", -5, ""), ("stage_slo", {"dreaming": {"tpot_slo_ms": 1}}, ""),
    ("stage_slo", {"answer": {"tpot_slo_ms": 0}}, ".answer.tpot_slo_ms"),
    ("stream_options", {"include_usage": True}, ""), ("stream_options", {"include_usage": "perhaps"}, ".include_usage"),
    ("response_format", {"type": "xml"}, ".type"), ("response_format", {"type": "json_schema"}, ".json_schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, ".json_schema.name"),
    ("response_format", {"type": "json_schema", "json_schema": FROB}, ".json_schema.schema"),
    ("guided_json", {"unevaluatedItems": False, "type": "array"}, ""), ("guided_regex", "a(", ""),
    ("guided_choice", [], ""), ("guided_grammar", "start: nope", ""), ("structured_outputs", {}, ""),
    ("structured_outputs", {"regexp": "a"}, ".regexp"), ("structured_outputs", {"regex": {"a": 1}}, ".regex"),
)  # fmt: skip


def check(response: httpx.Response, status: int, param: str | None = None) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert response.headers["X-Request-Id"]
    if param is not None:
        assert error["param"] == param
    return error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        *((body, None) for body in (b'{"prompt": ', b'"text"', b"", b"[" * 100_000)),
        (b'{"prompt": "x", "messages": [], "temperature": NaN}', None),
        *(({field: value}, field + part) for field, value, part in FIELDS),
        *(({field: value}, field) for field, value in UNSUPPORTED.items()),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"model": "gpt-17"}, "model"),
    ],
)
def test_bad_bodies_are_refused(plain, path, body, param):
    if isinstance(body, dict):
        base = GOOD if path == "/v1/completions" else {"messages": CHAT}
        body = json.dumps({**base, **body}).encode()
    check(plain.http.post(path, content=body), 404 if param == "model" else 400, param)
    assert plain.http.post("/v1/completions", json=GOOD).status_code == 200
    assert all(one.finish_reason for one in plain.engine.submitted)


def test_bad_bodies_of_one_endpoint_are_refused(plain):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
    for path, body, param in (
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [5, 10**9]}, "prompt"),
        ("/v1/completions", {"prompt": [1, 13]}, "prompt"),  # refused by the engine
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {"messages": image}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ("/v1/chat/completions", {"messages": image, "audio": {"voice": "a"}}, "audio"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 40}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": "f"}, "tools"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL, TOOL]}, "tools"),
        ("/v1/chat/completions", {"messages": CHAT, **FORCED, "guided_regex": "a"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": CHAT, **FORCED, "tools": [NOWHERE]}, "tools"),
        ("/v1/chat/completions", {"messages": CALLED}, "messages[1].tool_calls[0].function.arguments"),
        ("/v1/chat/completions", {"messages": CHAT, "reasoning_effort": "much"}, "reasoning_effort"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ):
        check(plain.http.post(path, json=body), 400, param)
    assert plain.http.post("/v1/completions", json=GOOD).status_code == 200


def test_a_large_body_is_refused(fake):
    live = fake()
    large = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
    check(live.http.post("/v1/completions", content=large), 413)
    check(live.http.post("/v1/completions", content=(large[i : i + 65536] for i in range(0, len(large), 65536))), 413)
    assert live.http.post("/v1/completions", json=GOOD).status_code == 200
    small = fake(config={"max_body_size": "1k"})
    check(small.http.post("/v1/completions", content=b" " * 1025), 413)


def test_a_full_queue_is_503(fake):
    live = fake(bound=2, delay=0.4)  # the streams do not end before they are left
    streams = [live.http.stream("POST", "/v1/completions", json={**GOOD, "stream": True}) for _ in range(2)]
    with streams[0], streams[1]:
        refused = live.http.post("/v1/completions", json=GOOD)
        assert check(refused, 503)["code"] == "queue_full" and refused.headers["Retry-After"] == "2"
        check(live.http.post("/v1/completions", json={**GOOD, "stream": True}), 503)
    live.quiet()
    check(live.http.post("/v1/completions", json={**GOOD, "n": 3}), 400, "n")  # can never fit
    with live.http.stream("POST", "/v1/completions", json={**GOOD, "stream": True}):
        check(live.http.post("/v1/completions", json={**GOOD, "n": 2}), 503)
    live.quiet()
    live.engine.delay = 0.0
    assert live.http.post("/v1/completions", json=GOOD).status_code == 200


def test_requests_that_the_engine_gives_up(fake):
    live = fake()
    live.engine.fail_after = 0
    check(live.http.post("/v1/completions", json=GOOD), 500)
    check(live.http.post("/v1/completions", json={**GOOD, "stream": True}), 500)
    live.engine.fail_after = 2
    with live.http.stream("POST", "/v1/completions", json={**GOOD, "stream": True}) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert response.status_code == 200 and lines[-1]["error"]["message"] == "out of luck"
    live.engine.fail_after, live.engine.reject = None, "no pool is large enough"
    assert check(live.http.post("/v1/completions", json=GOOD), 400)["code"] == "rejected"
    live.engine.reject = None
    assert live.http.post("/v1/completions", json=GOOD).status_code == 200


def test_a_bug_is_a_500_and_logged(fake, caplog):
    live = fake()
    submit, live.engine.submit = live.engine.submit, None
    error = check(live.http.post("/v1/completions", json=GOOD), 500)
    assert "TypeError" in error["message"] and "internal error" in caplog.text
    live.engine.submit = submit
    assert live.http.post("/v1/completions", json=GOOD).status_code == 200


def test_draining_refuses_new_requests_and_finishes_old_ones(fake):
    live = fake(delay=0.05)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(httpx.post, f"{live.url}/v1/completions", json={**GOOD, "max_tokens": 20}, timeout=60)
        until(lambda: live.engine.submitted)
        live.http.get("/health")  # a connection that outlives the listening socket
        live.call(live.ending.drain)
        until(lambda: live.service.draining)
        refused = live.http.post("/v1/completions", json=GOOD)
        assert check(refused, 503)["code"] == "shutting_down" and "Retry-After" in refused.headers
        check(live.http.get("/health"), 503)
    assert running.result().status_code == 200 and running.result().json()["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (GenerationFailed("a step hangs", UNAVAILABLE), 503, "unavailable"),
        (GenerationFailed("it waited 600 s", "expired"), 503, "queue_timeout"),
        (GenerationFailed("not now", "refused"), 429, "slo_unattainable"),
        (Unavailable("no instance responds", 7.0), 503, "unavailable"),
        (QueueFull("200 requests wait", 12.5), 503, "queue_full"),
    ],
)
def test_temporary_failures_have_retry_after(error: Exception, status: int, code: str) -> None:
    found = refusal(error)
    assert (found.status, found.code) == (status, code) and str(error) in str(found)
    assert int(response_of(error).headers["Retry-After"]) >= 1


def test_every_reason_has_a_status() -> None:
    assert {reason: refusal(GenerationFailed("why", reason)).status for reason in GIVEN_UP} == {
        "error": 500,
        "rejected": 400,
        "refused": 429,
        UNAVAILABLE: 503,
        "expired": 503,
    }
