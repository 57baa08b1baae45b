"""Streams that wait: headers before the first token, signs of life, and refusals that come late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.server.live import MODEL
from tests.support.timing import PATIENCE

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
}
PATHS = list(BODIES)


@pytest.fixture(scope="module")
def server(fakes: Any) -> Any:
    return fakes()


@pytest.fixture
def live(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that sends headers at once, signs of life often, and tokens when a test says so."""
    monkeypatch.setattr("jaxserve.server.sse.PATIENCE", 0.0)
    monkeypatch.setattr("jaxserve.server.sse.SILENCE", 0.02)
    server.engine.delay = 3600.0
    yield server
    server.engine.release()
    server.engine.delay, server.engine.fail_after, server.engine.reject = 0.0, None, None
    server.quiet()


def events(lines: list[str]) -> list[dict[str, Any]]:
    """Return the objects of a stream."""
    sent = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(item) for item in sent if item != "[DONE]"]


def signs(path: str, lines: list[str]) -> int:
    return lines.count("event: ping" if path == "/v1/messages" else ": waiting")


def waited(live: Any, path: str, most: int) -> tuple[Any, list[str]]:
    """Stream an answer whose first token comes after `most` signs of life; return the response and its lines."""
    with live.http.stream("POST", path, json={**BODIES[path], "stream": True}) as got:
        assert got.status_code == 200 and got.headers["content-type"].startswith("text/event-stream")
        lines = list[str]()
        for line in got.iter_lines():
            lines.append(line)
            if signs(path, lines) == most:
                live.engine.release()
        return got, lines


@pytest.mark.parametrize("path", PATHS)
def test_leaving_a_stream_that_waits_frees_the_request(live: Any, path: str) -> None:
    with live.http.stream("POST", path, json={**BODIES[path], "stream": True}) as got:
        next(got.iter_lines())
    live.quiet()


@pytest.mark.parametrize("path", PATHS)
def test_signs_of_life_change_no_answer(live: Any, path: str) -> None:
    """Headers and signs come while there is no token; everything else is as without."""
    _, lines = waited(live, path, 3)
    sent = events(lines)
    if path == "/v1/messages":
        assert [event["type"] for event in sent[:4]] == ["message_start", "ping", "ping", "ping"]
        assert sent[-1]["type"] == "message_stop"
        assert sum(event["type"] == "message_start" for event in sent) == 1
    elif path == "/v1/responses":
        assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
        assert [sent[0]["type"], sent[-1]["type"]] == ["response.created", "response.incomplete"]
    else:
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert sent[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", PATHS)
def test_a_late_refusal_ends_the_stream(live: Any, path: str) -> None:
    """With the headers sent, a refusal is the last event of the API's own kind."""
    live.engine.fail_after = 0
    got, lines = waited(live, path, 1)
    last = events(lines)[-1]
    if path == "/v1/messages":
        assert last["type"] == "error" and last["error"]["type"] == "api_error"
        assert last["request_id"] == got.headers["request-id"]
    elif path == "/v1/responses":
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    else:
        assert last["error"]["message"] == "out of luck"
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("path", PATHS)
def test_an_early_refusal_has_its_own_status(live: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr("jaxserve.server.sse.PATIENCE", PATIENCE)
    live.engine.delay, live.engine.fail_after = 0.0, 0
    got = live.http.post(path, json={**BODIES[path], "stream": True})
    assert got.status_code == 500 and "out of luck" in got.text


def test_the_clients_wait(live: Any) -> None:
    """OpenAI's and Anthropic's clients skip the signs of life, and raise late refusals as errors."""
    live.engine.delay = 0.1
    chunks = list(live.client.chat.completions.create(model=MODEL, messages=HI, max_tokens=2, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    with live.client.responses.stream(model=MODEL, input="Hi", max_output_tokens=2) as responses:
        assert list(responses)[-1].type == "response.incomplete"
    with live.anthropic.messages.stream(model=MODEL, messages=HI, max_tokens=2) as messages:
        assert messages.get_final_message().usage.output_tokens == 2
    live.engine.fail_after = 0
    with pytest.raises(openai.APIError, match="out of luck"):
        list(live.client.chat.completions.create(model=MODEL, messages=HI, stream=True))
    with pytest.raises(anthropic.APIStatusError, match="out of luck"):
        list(live.anthropic.messages.create(model=MODEL, messages=HI, max_tokens=2, stream=True))


def test_a_late_400_of_responses_is_not_sent_again(live: Any) -> None:
    """`server_error` would be: OpenAI's own code for what the client must change is `invalid_prompt`."""
    live.engine.reject = "no token is left to sample"
    _, lines = waited(live, "/v1/responses", 1)
    assert events(lines)[-1]["response"]["error"] == {"code": "invalid_prompt", "message": live.engine.reject}
