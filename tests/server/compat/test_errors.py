"""Errors as the clients of OpenAI and Anthropic tell them apart: class, type, when to come again, and the request."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from jaxserve.errors import QueueFull
from jaxserve.generation.generate import GenerationFailed
from jaxserve.server.messages.writer import MessageWriter
from tests.support.server.live import MODEL, Live

HI: list[Any] = [{"role": "user", "content": "Hi"}]
Fake = Callable[..., Live]


def compressed(live: Live) -> None:
    live.client = live.client.with_options(default_headers={"Content-Encoding": "gzip"})
    live.anthropic = live.anthropic.with_options(default_headers={"Content-Encoding": "gzip"})


def much_used(live: Live) -> None:
    assert live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20}).status_code == 200


def draining(live: Live) -> None:
    live.service.draining = True


def full_queue(live: Live) -> None:
    live.engine.bound, live.engine.check_outputs = 0, lambda prompts, n: None


def broken(live: Live) -> None:
    live.engine.fail_after = 0


def bad_value(live: Live) -> None:
    live.engine.reject = "no pool is large enough"


def nothing(live: Live) -> None:
    """Change nothing: the settings refuse."""


@pytest.mark.parametrize(
    ("change", "config", "statuses", "of_openai", "of_anthropic", "kinds", "later"),
    [
        (bad_value, {}, 400, openai.BadRequestError, anthropic.BadRequestError, "invalid_request_error", False),
        (nothing, {"api_key": ("right",)}, 401, openai.AuthenticationError, anthropic.AuthenticationError,
         "authentication_error", False),
        (nothing, {"served_model_name": ("other",)}, 404, openai.NotFoundError, anthropic.NotFoundError,
         "not_found_error", False),
        (nothing, {"max_body_size": 20}, 413, openai.APIStatusError, anthropic.RequestTooLargeError,
         "invalid_request_error request_too_large", False),
        (compressed, {}, 415, openai.APIStatusError, anthropic.APIStatusError, "invalid_request_error", False),
        (much_used, {"limits": "default: {tokens_per_second: 0.001}"}, 429, openai.RateLimitError,
         anthropic.RateLimitError, "rate_limit_error", True),
        (broken, {}, 500, openai.InternalServerError, anthropic.InternalServerError,
         "internal_server_error api_error", False),
        (draining, {}, 503, openai.InternalServerError, anthropic.ServiceUnavailableError,
         "service_unavailable_error overloaded_error", True),
        (full_queue, {}, (503, 529), openai.InternalServerError, anthropic.OverloadedError,
         "service_unavailable_error overloaded_error", True),
    ],
)  # fmt: skip
def test_classes_of_errors(
    fake: Fake, tmp_path: Path, change: Callable[[Live], None], config: dict[str, Any], statuses: int | tuple[int, int],
    of_openai: type[openai.APIStatusError], of_anthropic: type[anthropic.APIStatusError], kinds: str, later: bool,
) -> None:  # fmt: skip
    """Clients retry by status and `Retry-After`, and show the request's id. statuses: OpenAI's, Anthropic's."""
    if "limits" in config:
        (tmp_path / "limits.yaml").write_text(config["limits"])
        config = {"limits": str(tmp_path / "limits.yaml")}
    live = fake(config=config)
    change(live)
    own, *others = kinds.split()
    status, anthropic_status = (statuses, statuses) if isinstance(statuses, int) else statuses
    for stream in (False, True):
        asks: list[Callable[[], Any]] = [
            partial(live.client.chat.completions.create, model=MODEL, messages=HI, stream=stream),
            partial(live.client.completions.create, model=MODEL, prompt="Hi", stream=stream),
            partial(live.client.responses.create, model=MODEL, input="Hi", stream=stream),
        ]
        for ask in asks:
            with pytest.raises(of_openai) as told:
                ask()
            assert (told.value.status_code, told.value.type) == (status, own)
            assert told.value.request_id and (told.value.response.headers.get("retry-after") is not None) is later
        with pytest.raises(of_anthropic) as caught:
            live.anthropic.messages.create(model=MODEL, messages=HI, max_tokens=5, stream=stream)
        body: Any = caught.value.body
        assert (caught.value.status_code, body["error"]["type"]) == (anthropic_status, others[0] if others else own)
        assert body["request_id"] == caught.value.request_id
        headers = caught.value.response.headers
        assert (headers.get("retry-after") is not None) is later
        assert (headers.get("x-should-retry") == "false") is (anthropic_status < 500 and not later)


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_retry_a_full_queue(fake: Fake, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients wait as long as the server says, and send the request again."""
    live, waits = fake(), list[float]()
    for client in (openai, anthropic):
        clock = SimpleNamespace(time=time.time, time_ns=time.time_ns, sleep=waits.append)
        monkeypatch.setattr(f"{client.__name__}._base_client.time", clock)
    submit, refused = live.engine.submit, list[int]()

    def later(*given: Any) -> int:
        if len(refused) % 2 == 0:
            refused.append(1)
            raise QueueFull("1 request waits")
        refused.append(0)
        return int(submit(*given))

    live.engine.submit = later
    of_openai, of_anthropic = live.client.with_options(max_retries=1), live.anthropic.with_options(max_retries=1)
    of_openai.chat.completions.create(model=MODEL, messages=HI, max_tokens=2, stream=stream)
    of_openai.responses.create(model=MODEL, input="Hi", max_output_tokens=2, stream=stream)
    of_anthropic.messages.create(model=MODEL, messages=HI, max_tokens=2, stream=stream)
    assert refused == [1, 0] * 3 and waits == [1.0] * 3


def test_a_model_that_is_not_served_is_known_by_its_words(fake: Fake) -> None:
    """Claude Code takes its fallback model where a message of this type has `model:`."""
    live = fake(config={"served_model_name": ("other",)})
    with pytest.raises(anthropic.NotFoundError) as caught:
        live.anthropic.messages.create(model=MODEL, messages=HI, max_tokens=2)
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error" and body["error"]["message"].startswith(f"model: '{MODEL}'")


def test_unknown_routes_of_anthropic_have_its_shape(fake: Fake) -> None:
    live = fake()
    with pytest.raises(anthropic.NotFoundError) as caught:
        live.anthropic.messages.batches.retrieve("msgbatch_1")
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["request_id"] == caught.value.request_id and "POST /v1/messages" in body["error"]["message"]
    wrong = live.http.put("/v1/messages", json={})
    assert (wrong.status_code, wrong.headers["allow"], wrong.json()["type"]) == (405, "POST", "error")


def test_a_load_within_a_stream_is_an_event_of_its_kind() -> None:
    """With the headers sent, Claude Code knows the load by the type."""
    writer = MessageWriter({}, "req")
    event = writer.failure(GenerationFailed("it waited 600 s", "expired")).decode()
    assert event.startswith("event: error\n") and '"type":"overloaded_error"' in event.replace(" ", "")
