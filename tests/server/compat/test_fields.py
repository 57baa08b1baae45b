"""Fields as clients send them: null, under the names of other engines, or near the name of an objective."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from jaxserve.server import openai
from jaxserve.server.documented import BODIES as BODIES_OF_ROUTES
from jaxserve.server.messages.request import CountBody, MessagesBody
from jaxserve.server.prompts import messages_of
from jaxserve.server.responses.request import ResponsesBody
from jaxserve.server.structured import constraint_of, structured_of
from jaxserve.tools.definitions import tools_of
from tests.support.server.live import Live
from tests.support.server.peers import differs

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TEXT = {"prompt": "Hi", "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": "Hi"},
}
MODELS = {
    "/v1/chat/completions": openai.ChatBody,
    "/v1/completions": openai.CompletionBody,
    "/tokenize": openai.TokenizeBody,
}


@pytest.mark.parametrize("path", BODIES)
def test_null_counts_as_left_out(plain: Live, path: str) -> None:
    named = {*openai.Drawn.model_fields, *(MODELS[path].model_fields if path in MODELS else ())}
    nulls = dict.fromkeys(named, None)
    answer = plain.http.post(path, json={**nulls, **BODIES[path]})
    assert answer.status_code == 200, answer.text


def test_null_within_options_counts_as_left_out(plain: Live) -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    answer = plain.http.post("/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": options})
    assert answer.status_code == 200 and '"usage"' not in answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("ttft_slo", "ttft_slo_ms"), ("ttft_slo_s", "ttft_slo_ms"), ("slo_ttft_ms", "ttft_slo_ms"),
        ("ttft", "ttft_slo_ms"), ("ttftSloMs", "ttft_slo_ms"), ("max_ttft_ms", "ttft_slo_ms"),
        ("TTFT_SLO_MS", "ttft_slo_ms"), ("tpot_slo", "tpot_slo_ms"), ("tpot_ms", "tpot_slo_ms"),
        ("tpot-slo-ms", "tpot_slo_ms"), ("tbt_slo", "tbt_slo_ms"), ("itl_slo_ms", "tbt_slo_ms"),
        ("slo", "stage_slo"), ("stage_slos", "stage_slo"), ("e2e_slo_ms", "tpot_slo_ms"),
        ("time_to_first_token_ms", "ttft_slo_ms"), ("timePerOutputToken", "tpot_slo_ms"),
    ],
)  # fmt: skip
@differs(
    "vLLM",
    "ignores unknown fields",
    "one near the name of an objective is 400: ignoring it would promise nothing",
)
def test_what_looks_like_an_objective_is_no_silent_field(plain: Live, path: str, name: str, right: str) -> None:
    answer = plain.http.post(path, json={**BODIES[path], name: 500})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == name and right in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "name",
    ["x-ttft-slo", "x-slo-ttft", "ttft-slo-ms", "X-TTFT-MS", "x-tpot-slo-ms", "x-slo-tbt-ms", "x-itl-slo", "x-slo",
     "x-llm-d-slo-ttft", "x-time-to-first-token-ms", "x-time-per-output-token"],
)  # fmt: skip
def test_what_looks_like_an_objective_is_no_silent_header(plain: Live, path: str, name: str) -> None:
    answer = plain.http.post(path, json=BODIES[path], headers={name: "500"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name.lower())
    assert "x-slo-ttft-ms" in error["message"] and "tpot_slo_ms" in error["message"]


@pytest.mark.parametrize("name", ["x-slot-id", "x-e2e-test", "x-slow", "x-isolation", "x-title", "x-mitl-id"])
def test_other_headers_are_ignored(plain: Live, name: str) -> None:
    assert plain.http.post("/v1/chat/completions", json=CHAT, headers={name: "500"}).status_code == 200


@pytest.mark.parametrize("name", ["slot_id", "id_slot", "slow", "isolation", "title", "client_metadata", "nvext"])
@differs(
    "OpenAI",
    "refuses unknown fields",
    "they are ignored, as by vLLM: clients send those of other engines",
)
def test_other_unknown_fields_are_ignored(plain: Live, name: str) -> None:
    assert plain.http.post("/v1/chat/completions", json={**CHAT, name: 1}).status_code == 200


SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"regex": "a+"}, "regex"), ({"ebnf": 'root ::= "a"'}, "grammar"), ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": SCHEMA}, "json"), ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json"),
    ],
)  # fmt: skip
def test_constraints_of_other_engines_hold(given: dict[str, Any], kind: str) -> None:
    wanted = structured_of(openai.validated({**CHAT, **given}, openai.ChatBody))
    assert (
        wanted is not None and getattr(wanted.outputs, kind) is not None and wanted.field.startswith(next(iter(given)))
    )


@pytest.mark.parametrize(
    "given", [{"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"thinking": False}], ids=str
)
def test_thinking_is_a_variable_of_the_template(given: dict[str, Any]) -> None:
    body = openai.validated({**CHAT, **given}, openai.ChatBody)
    assert body.template_arguments == {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"return_token_ids": True}, "return_token_ids"), ({"truncation_side": "right"}, "truncation_side"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"), ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused(plain: Live, given: dict[str, Any], field: str) -> None:
    answer = plain.http.post("/v1/chat/completions", json={**CHAT, **given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_an_empty_name_is_the_served_model(plain: Live) -> None:
    for path, body in BODIES.items():
        assert plain.http.post(path, json={**body, "model": ""}).status_code == 200, path


def test_usage_of_each_chunk_needs_include_usage(plain: Live) -> None:
    for include, said in ((False, False), (True, True)):
        options = {"include_usage": include, "continuous_usage_stats": True}
        answer = plain.http.post("/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": options})
        assert ('"usage"' in answer.text) is said


FORMAT = {"name": "a", "schema": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}


@pytest.mark.parametrize("strict", [None, False, True])
def test_schemas_are_enforced_in_full_only_where_strict(strict: bool | None) -> None:
    given = {"type": "json_schema", "json_schema": {**FORMAT, "strict": strict}}
    wanted = structured_of(openai.validated({**CHAT, "response_format": given}, openai.ChatBody))
    assert wanted is not None and wanted.outputs.lenient is not bool(strict)
    own = structured_of(openai.validated({**CHAT, "guided_json": FORMAT["schema"]}, openai.ChatBody))
    assert own is not None and not own.outputs.lenient


@differs(
    "OpenAI",
    "a model with `response_format` may call tools",
    "the format leaves no calls, as with vLLM; the log says so once",
)
def test_a_format_that_leaves_no_calls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    openai._warned.clear()
    tool = {"type": "function", "function": {"name": "f"}}
    body = openai.validated({**CHAT, "response_format": {"type": "json_object"}}, openai.ChatBody)
    for _ in range(2):
        assert constraint_of(body, tools_of([tool])) is not None
    assert caplog.text.count("leaves the model no calls") == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_compressed_body_is_415(plain: Live, path: str) -> None:
    content = gzip.compress(json.dumps(BODIES[path]).encode())
    for coding in ("gzip", "GZIP", "br"):
        answer = plain.http.post(path, content=content, headers={"Content-Encoding": coding})
        assert answer.status_code == 415 and "without compression" in answer.text
    plain_body = plain.http.post(path, json=BODIES[path], headers={"Content-Encoding": "identity"})
    assert plain_body.status_code == 200


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"), (["a", "b"], "a\nb"), ([{"type": "text", "text": "a"}], "a"), (None, ""), ([], ""),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "No."}], "No."),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
    ],
)  # fmt: skip
def test_contents_are_texts(content: Any, text: str) -> None:
    assert messages_of([{"role": "user", "content": content}])[0]["content"] == text


def test_thinking_in_the_history_has_the_name_that_templates_read() -> None:
    for names in (["reasoning"], ["reasoning_content"], ["reasoning", "reasoning_content"]):
        message = messages_of([{"role": "assistant", "content": "a", **dict.fromkeys(names, "Hm.")}])[0]
        assert message["reasoning_content"] == "Hm."


@pytest.mark.parametrize("kind", ["image_url", ["text"], {"a": 1}, 3, None])
def test_other_contents_are_refused(plain: Live, kind: Any) -> None:
    part = {"type": kind, "text": "a"}
    given = {"messages": [{"role": "user", "content": [part]}]}
    for path, body in (
        ("/v1/chat/completions", given), ("/v1/messages", {**given, "max_tokens": 1}),
        ("/v1/responses", {"input": given["messages"]}), ("/v1/responses", {"input": [part]}),
        ("/v1/responses", {"input": "x", "tools": [part]}), ("/v1/messages", {**CHAT, "tools": [part]}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "namespace", "name": "a", "tools": [part]}]}),
    ):  # fmt: skip
        answer = plain.http.post(path, json=body)
        assert answer.status_code == 400, (path, body, answer.text)


NEEDED = {"messages": CHAT["messages"], "prompt": "x", "input": "x", "text_1": "a", "text_2": "b"}
NEEDED |= {"max_tokens": 1, "tokens": [1], "replicas": None, "query": "x", "documents": ["x"]}


@pytest.mark.parametrize("kind", [*BODIES_OF_ROUTES, ResponsesBody, MessagesBody, CountBody])
def test_each_body_with_nulls_is_that_without(kind: type[openai.Body]) -> None:
    needed = {name: NEEDED[name] for name, field in kind.model_fields.items() if field.is_required()}
    nulls = {name: None for name in kind.model_fields if name not in needed}
    assert openai.validated({**needed, **nulls}, kind) == openai.validated(needed, kind)
