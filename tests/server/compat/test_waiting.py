"""Streams that wait: headers before the first token, signs of life, and refusals that come late."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.support.server.live import MODEL

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
}
PATHS = list(BODIES)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send headers at once, and signs of life often."""
    monkeypatch.setattr("jaxserve.server.sse.PATIENCE", 0.0)
    monkeypatch.setattr("jaxserve.server.sse.SILENCE", 0.02)


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


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("path", PATHS)
def test_leaving_a_stream_that_waits_frees_the_request(fake: Any, path: str) -> None:
    live = fake(delay=3600.0)
    with live.http.stream("POST", path, json={**BODIES[path], "stream": True}) as got:
        next(got.iter_lines())
    live.quiet()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("path", PATHS)
def test_signs_of_life_change_no_answer(fake: Any, path: str) -> None:
    """Headers and signs come while there is no token; everything else is as without."""
    _, lines = waited(fake(delay=3600.0), path, 3)
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


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("path", PATHS)
def test_a_late_refusal_ends_the_stream(fake: Any, path: str) -> None:
    """With the headers sent, a refusal is the last event of the API's own kind."""
    live = fake(delay=3600.0)
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
def test_an_early_refusal_has_its_own_status(fake: Any, path: str) -> None:
    live = fake()
    live.engine.fail_after = 0
    got = live.http.post(path, json={**BODIES[path], "stream": True})
    assert got.status_code == 500 and "out of luck" in got.text


@pytest.mark.usefixtures("hurried")
def test_the_clients_wait(fake: Any) -> None:
    """OpenAI's and Anthropic's clients skip the signs of life, and raise late refusals as errors."""
    live = fake(delay=0.1)
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


@pytest.mark.usefixtures("hurried")
def test_a_late_400_of_responses_is_not_sent_again(fake: Any) -> None:
    """`server_error` would be: OpenAI's own code for what the client must change is `invalid_prompt`."""
    live = fake(delay=3600.0)
    live.engine.reject = "no token is left to sample"
    _, lines = waited(live, "/v1/responses", 1)
    assert events(lines)[-1]["response"]["error"] == {"code": "invalid_prompt", "message": live.engine.reject}
