"""What the vendors' own packages say: Anthropic's client, and the types of both APIs. Imported at their first use."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import TypeAdapter

if TYPE_CHECKING:
    import anthropic


def anthropic_of(url: str, key: str = "none", **more: Any) -> anthropic.Anthropic:
    """Return a client of the server at `url`; close it, or use it in a `with`."""
    import anthropic

    # Loading the certificates, which plain HTTP does not need, takes longer than an answer.
    http = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, http_client=http, **more)


@cache
def message() -> TypeAdapter[Any]:
    """Return the validator of an answer of /v1/messages."""
    from anthropic.types import Message

    return TypeAdapter(Message)


@cache
def message_event() -> TypeAdapter[Any]:
    """Return the validator of an event of a stream of /v1/messages."""
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


@cache
def response() -> TypeAdapter[Any]:
    """Return the validator of an answer of /v1/responses."""
    from openai.types.responses import Response

    return TypeAdapter(Response)


@cache
def response_event() -> TypeAdapter[Any]:
    """Return the validator of an event of a stream of /v1/responses."""
    from openai.types.responses import ResponseStreamEvent

    return TypeAdapter(ResponseStreamEvent)


def events_of(answer: httpx.Response, valid: TypeAdapter[Any], unknown: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the events of a stream, named as their data says, and valid but for the `unknown` types."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in unknown:
            valid.validate_python(event)
        found.append(event)
    return found
