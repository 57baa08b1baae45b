"""Errors as the clients of OpenAI and Anthropic tell them apart: class, type, when to come again, and the request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from jaxserve.errors import QueueFull
from tests.support.server.live import MODEL, Live

HI: list[Any] = [{"role": "user", "content": "Hi"}]
Fake = Callable[..., Live]


def wrong_key(fake: Fake, tmp_path: Path) -> Live:
    return fake(config={"api_key": ("right",)})


def wrong_model(fake: Fake, tmp_path: Path) -> Live:
    return fake(config={"served_model_name": ("other",)})


def large_body(fake: Fake, tmp_path: Path) -> Live:
    return fake(config={"max_body_size": 20})


def much_used(fake: Fake, tmp_path: Path) -> Live:
    (tmp_path / "limits.yaml").write_text("default: {tokens_per_second: 0.001}")
    live = fake(config={"limits": str(tmp_path / "limits.yaml")})
    assert live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20}).status_code == 200
    return live


def draining(fake: Fake, tmp_path: Path) -> Live:
    live = fake()
    live.service.draining = True
    return live


def full_queue(fake: Fake, tmp_path: Path) -> Live:
    live = fake(bound=0)
    live.engine.check_outputs = lambda prompts, n: None
    return live


def broken(fake: Fake, tmp_path: Path) -> Live:
    live = fake()
    live.engine.fail_after = 0
    return live


def bad_value(fake: Fake, tmp_path: Path) -> Live:
    live = fake()
    live.engine.reject = "no pool is large enough"
    return live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("server", "status", "of_openai", "of_anthropic", "kinds", "later"),
    [
        (bad_value, 400, openai.BadRequestError, anthropic.BadRequestError, "invalid_request_error", False),
        (wrong_key, 401, openai.AuthenticationError, anthropic.AuthenticationError, "authentication_error", False),
        (wrong_model, 404, openai.NotFoundError, anthropic.NotFoundError, "not_found_error", False),
        (large_body, 413, openai.APIStatusError, anthropic.RequestTooLargeError,
         "invalid_request_error request_too_large", False),
        (much_used, 429, openai.RateLimitError, anthropic.RateLimitError, "rate_limit_error", True),
        (broken, 500, openai.InternalServerError, anthropic.InternalServerError,
         "internal_server_error api_error", False),
        (draining, 503, openai.InternalServerError, anthropic.ServiceUnavailableError,
         "service_unavailable_error overloaded_error", True),
        (full_queue, 503, openai.InternalServerError, anthropic.ServiceUnavailableError,
         "service_unavailable_error overloaded_error", True),
    ],
)  # fmt: skip
def test_classes_of_errors(
    fake: Fake,
    tmp_path: Path,
    stream: bool,
    server: Callable[[Fake, Path], Live],
    status: int,
    of_openai: type[openai.APIStatusError],
    of_anthropic: type[anthropic.APIStatusError],
    kinds: str,
    later: bool,
) -> None:
    """Clients retry by status and `Retry-After`, and show the request's id."""
    live = server(fake, tmp_path)
    own, *others = kinds.split()
    asks: list[Callable[[], Any]] = [
        lambda: live.client.chat.completions.create(model=MODEL, messages=HI, stream=stream),
        lambda: live.client.completions.create(model=MODEL, prompt="Hi", stream=stream),
        lambda: live.client.responses.create(model=MODEL, input="Hi", stream=stream),
    ]
    for ask in asks:
        with pytest.raises(of_openai) as told:
            ask()
        assert (told.value.status_code, told.value.type) == (status, own)
        assert told.value.request_id and (told.value.response.headers.get("retry-after") is not None) is later
    with pytest.raises(of_anthropic) as caught:
        live.anthropic.messages.create(model=MODEL, messages=HI, max_tokens=5, stream=stream)
    body: Any = caught.value.body
    assert (caught.value.status_code, body["error"]["type"]) == (status, others[0] if others else own)
    assert body["request_id"] == caught.value.request_id
    assert (caught.value.response.headers.get("retry-after") is not None) is later


def test_openai_client_retries_a_full_queue(fake: Fake) -> None:
    """The client waits as long as the server says, and sends the request again."""
    live = fake()
    submit, refused = live.engine.submit, list[int]()

    def later(*given: Any) -> int:
        if not refused:
            refused.append(1)
            raise QueueFull("1 request waits")
        return int(submit(*given))

    live.engine.submit = later
    made = live.client.with_options(max_retries=1).chat.completions.create(model=MODEL, messages=HI, max_tokens=2)
    assert refused and made.choices[0].finish_reason == "length"
