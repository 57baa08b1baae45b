"""A prompt that does not fit the context, in the words by which the clients of each API know it."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import pytest

from tests.support.server.live import MODEL

LONG = "def main( " * 300
CHAT = [{"role": "user", "content": LONG}]
SHORT = [{"role": "user", "content": "def main("}]
WORDS = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested (at least )?(\d+) tokens "
    r"\((?:at least )?(\d+) in the (\w+), (\d+) in the completion\)\. "
    r"Please reduce the length of the (\w+) or completion\."
)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True}, "messages"),
        ("/v1/chat/completions", {"messages": SHORT, "max_tokens": 5000}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
        ("/v1/chat/completions", {"messages": SHORT * 300}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 5000}, "input"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 250, "max_tokens": 10}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 300}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 10**30}, "prompt"),
        ("/v1/embeddings", {"input": [5] * 300}, "input"),
    ],
)
def test_openai_words(plain: Any, path: str, body: dict[str, Any], param: str) -> None:
    got = plain.http.post(path, json=body)
    error = got.json()["error"]
    assert (got.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    match = WORDS.fullmatch(error["message"])
    assert match is not None, error["message"]
    context, asked, prompt, output = (int(match[at]) for at in (1, 3, 4, 6))
    assert asked == prompt + output > context == 256
    assert match[5] == match[7] == param


@pytest.mark.parametrize(
    ("messages", "tokens", "words"),
    [
        (CHAT, 5, r"prompt is too long: (\d+) tokens > 255 maximum"),
        ([{"role": "user", "content": "a" * 100_000}], 5, r"prompt is too long: at least (\d+) tokens > 255 maximum"),
        (SHORT, 5000, r"input length and `max_tokens` exceed context limit: (\d+) \+ 5000 > 256, "
                      r"decrease input length or `max_tokens` and try again"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_words(plain: Any, messages: list[Any], tokens: int, words: str, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        plain.anthropic.messages.create(model=MODEL, max_tokens=tokens, messages=messages, stream=stream)
    body: Any = caught.value.body
    assert re.fullmatch(words, body["error"]["message"]), body
    assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", "messages")
    assert body["request_id"] == caught.value.request_id == caught.value.response.headers["request-id"]


def test_a_retry_with_what_is_left_fits(plain: Any) -> None:
    """Claude Code reads the numbers, and asks again with what is left."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        plain.anthropic.messages.create(model=MODEL, max_tokens=5000, messages=SHORT)
    match = re.search(r"(\d+) \+ (\d+) > (\d+)", str(caught.value))
    assert match is not None
    prompt, _, context = map(int, match.groups())
    result = plain.anthropic.messages.create(model=MODEL, max_tokens=context - prompt, messages=SHORT)
    assert result.usage.input_tokens + result.usage.output_tokens == context


@pytest.mark.parametrize("headers", [{"x-request-id": "own-1"}, {}])
def test_anthropic_request_ids(fake: Any, headers: dict[str, str]) -> None:
    """Answers and errors have the header that Anthropic's client reads, errors also the field."""
    plain = fake(config={"max_body_size": 500})
    good = plain.http.post("/v1/messages", json={"model": MODEL, "max_tokens": 2, "messages": SHORT}, headers=headers)
    bad = plain.http.post("/v1/messages", json={"model": "other", "max_tokens": 2, "messages": SHORT}, headers=headers)
    large = plain.http.post("/v1/messages", headers=headers, content=b" " * 501)
    assert (good.status_code, bad.status_code, large.status_code) == (200, 404, 413)
    for got in (good, bad, large):
        assert (
            got.headers["request-id"]
            == got.headers["x-request-id"]
            == headers.get("x-request-id", got.headers["request-id"])
        )
    for got in (bad, large):
        assert got.json()["request_id"] == got.headers["request-id"]
    assert "request-id" not in plain.http.get("/v1/models").headers
