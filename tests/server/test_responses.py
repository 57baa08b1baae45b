"""POST /v1/responses through OpenAI's client, on an engine double that repeats its prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from jaxserve.server.responses.store import MAX_STORED, Store
from tests.support.server import vendors

MODEL = "jaxserve-demo"
Fake = Callable[..., Any]


def events(live: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    made = live.http.post("/v1/responses", json={"input": "Hi", "stream": True, **fields})
    found = vendors.events_of(made, vendors.response_event())
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def refused(live: Any, field: str, **fields: Any) -> str:
    """Return the message of a refusal that names the field."""
    made = live.http.post("/v1/responses", json={"input": "Hi", **fields})
    error = made.json()["error"]
    assert (made.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error"), made.text
    return str(error["message"])


def test_create(plain: Any) -> None:
    made = plain.client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=5, temperature=0.5, top_p=0.9,
        metadata={"trace": "7"}, user="me", extra_headers={"x-slo-tpot-ms": "70"},
        extra_body={"ttft_slo_ms": 900, "priority": 3},
    )  # fmt: skip
    vendors.response().validate_python(made.to_dict())
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output[0].status == "incomplete"
    assert made.output_text == plain.service.tokenizer.decode(
        plain.engine.submitted[0].prompt[:5], skip_special_tokens=True
    )
    assert (made.temperature, made.top_p, made.metadata, made.user) == (0.5, 0.9, {"trace": "7"}, "me")
    assert made.usage.output_tokens == 5
    assert made.usage.total_tokens == made.usage.input_tokens + 5
    request = plain.engine.submitted[0]
    assert (request.slo.ttft, request.slo.tpot, request.priority) == (0.9, 0.07, 3), "as in chat"
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p) == (5, 0.5, 0.9)
    assert "Be brief." in plain.sent() and "Hello" in plain.sent()


def test_a_stream_is_the_whole_answer(plain: Any) -> None:
    plain.client.responses.create(model=MODEL, input="Same", max_output_tokens=1)
    prompt = plain.engine.submitted[0].prompt
    stop = next(token for at, token in enumerate(prompt) if at > 3 and token not in prompt[:at])
    given: dict[str, Any] = {"model": MODEL, "input": "Same", "extra_body": {"stop_token_ids": [stop]}}
    given |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = plain.client.responses.create(**given)
    with plain.client.responses.stream(**given) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.output_text.delta" in seen
    assert final.output_text == whole.output_text != ""
    assert final.output[0].content[0].logprobs == whole.output[0].content[0].logprobs
    assert {len(one.top_logprobs) for one in whole.output[0].content[0].logprobs} == {1}


def test_a_conversation_is_continued(plain: Any) -> None:
    first = plain.client.responses.create(model=MODEL, input="Red", instructions="Only once.", max_output_tokens=2)
    second = plain.client.responses.create(
        model=MODEL, input="Green", previous_response_id=first.id, max_output_tokens=2
    )
    third = plain.client.responses.create(
        model=MODEL, input="Blue", previous_response_id=second.id, max_output_tokens=1
    )
    prompt = plain.sent()
    texts = ["Red", first.output_text, "Green", second.output_text, "Blue"]
    at = 0
    for text in texts:
        at = prompt.index(text, at) + len(text)
    assert "Only once." not in prompt  # instructions are of one response
    assert third.previous_response_id == second.id


def test_stored_responses(plain: Any) -> None:
    made = plain.client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert made.to_dict()["store"] is True
    assert plain.client.responses.retrieve(made.id).to_dict() == made.to_dict()
    items = plain.client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items] == ["Hi"]
    several = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    other = plain.client.responses.create(model=MODEL, input=several, max_output_tokens=1)
    for order, texts in (("asc", ["One", "Two"]), ("desc", ["Two", "One"])):
        items = plain.client.responses.input_items.list(other.id, order=order)
        assert [item.content[0].text for item in items] == texts
    streamed = events(plain, max_output_tokens=2)[-1]["response"]
    assert plain.client.responses.retrieve(streamed["id"]).to_dict() == streamed
    plain.client.responses.delete(made.id)
    for call in (plain.client.responses.retrieve, plain.client.responses.delete):
        with pytest.raises(openai.NotFoundError) as error:
            call(made.id)
        assert error.value.param == "response_id"
    with pytest.raises(openai.NotFoundError) as error:
        plain.client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"


def test_nothing_is_left_of_a_request_without_store(fake: Fake) -> None:
    live = fake()
    made = live.client.responses.create(model=MODEL, input="Hi", max_output_tokens=2, store=False)
    events(live, max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        live.client.responses.retrieve(made.id)
    live.quiet()


def test_keys_see_their_own_responses(fake: Fake) -> None:
    live = fake(config={"api_key": ("one", "two")})
    body = {"input": "Hi", "max_output_tokens": 1}
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    id = live.http.post("/v1/responses", json=body, headers=one).json()["id"]
    assert live.http.get(f"/v1/responses/{id}", headers=one).status_code == 200
    assert live.http.get(f"/v1/responses/{id}", headers=two).status_code == 404
    assert live.http.delete(f"/v1/responses/{id}", headers=two).status_code == 404
    body["previous_response_id"] = id
    assert live.http.post("/v1/responses", json=body, headers=two).status_code == 404
    assert live.http.get(f"/v1/responses/{id}").status_code == 401


def test_a_server_without_a_store(fake: Fake) -> None:
    live = fake(config={"response_store_size": "0"})
    made = live.client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert made.to_dict()["store"] is False
    assert "--response-store-size" in refused(live, "store", store=True)
    told = live.http.get(f"/v1/responses/{made.id}")
    assert told.status_code == 404 and "--response-store-size" in told.json()["error"]["message"]


def test_a_failure_amid_a_stream_is_the_last_event(fake: Fake) -> None:
    live = fake()
    live.engine.fail_after = 4
    last = events(live)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["status"] == "incomplete"
    live.engine.fail_after = 0
    made = live.http.post("/v1/responses", json={"input": "Hi", "stream": True})
    assert made.status_code == 500  # before the first event


TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
REFUSALS: tuple[Any, ...] = (
    ("background", {"background": True}, "wait"),
    ("conversation", {"conversation": "conv_1"}, "previous_response_id"),
    ("prompt", {"prompt": {"id": "pmpt_1"}}, "instructions"),
    ("truncation", {"truncation": "auto"}, "auto"),
    ("include", {"include": ["message.everything"]}, "message.everything"),
    ("max_output_tokens", {"max_output_tokens": 0}, "max_output_tokens=0"),
    ("top_logprobs", {"top_logprobs": 21}, "0 to 20"),
    ("input[0].role", {"input": [{"role": "robot", "content": "x"}]}, "robot"),
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text"),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "1"}]}, "must be a text"),
    ("input[0]", {"input": ["x"]}, "must be an object"),
    ("input", {"input": []}, "at least one"),
    ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}, "must be a text"),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}, "json_schema"),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}}, "object"),
    ("reasoning.effort", {"reasoning": {"effort": "huge"}}, "medium"),
    ("metadata", {"metadata": {"a": 1}}, "metadata.a=1"),
    ("metadata", {"metadata": {str(n): "x" for n in range(17)}}, "at most 16"),
    ("temperature", {"temperature": -1}, "temperature=-1"),
    ("tools[0].type", {"tools": [{"type": "computer"}]}, "computer"),
    ("tools[0].name", {"tools": [{**TOOL, "name": "a b"}]}, "a b"),
    ("tools[0].name", {"tools": [{"type": "function"}]}, "name"),
    ("tools[0].parameters.type", {"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "array"),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "sub"),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "sometimes"}, "sometimes"),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
    ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 1}]}, "1"),
)


def test_refusals_name_the_field(plain: Any) -> None:
    for field, given, told in REFUSALS:
        message = refused(plain, field, **given)
        assert told in message and "function." not in message


def test_other_refusals(plain: Any) -> None:
    missing = plain.http.post("/v1/responses", json={"model": MODEL})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "input")
    other = plain.http.post("/v1/responses", json={"model": "gpt-9", "input": "Hi"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    made = plain.client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError) as error:
        plain.client.responses.cancel(made.id)
    assert error.value.param == "background"


def put(store: Store, id: str, text: str = "", client: str = "") -> None:
    store.put(client, {"id": id, "text": text}, [], [])


def has(store: Store, id: str) -> bool:
    try:
        return bool(store.get("", id, "response_id"))
    except Exception:
        return False


def test_the_store_is_bounded() -> None:
    now = [0.0]
    store = Store(110, 10.0, lambda: now[0])
    put(store, "a")
    put(store, "b")
    assert has(store, "a")  # and is used later than b
    put(store, "c", "x" * 30)
    put(store, "d")
    assert store.size <= 110 and [has(store, id) for id in "abcd"] == [True, False, True, True]
    put(store, "e", "x" * 110)
    assert not has(store, "e") and len(store) == 3
    now[0] = 10.0
    assert not has(store, "a") and (len(store), store.size) == (0, 0)
    many = Store(1 << 30, 1.0)
    for number in range(MAX_STORED + 5):
        put(many, str(number))
    assert len(many) == MAX_STORED and not has(many, "4") and has(many, "5")
