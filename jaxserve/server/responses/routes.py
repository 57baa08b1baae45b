"""The routes below /v1/responses."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidValue
from jaxserve.server.documented import body_schema
from jaxserve.server.replies import counted, prepared, replied, reply
from jaxserve.server.responses.items import Message, messages_of_items
from jaxserve.server.responses.request import NAMES, ResponsesBody, chat_of, check_body
from jaxserve.server.responses.store import Store
from jaxserve.server.responses.tools import tools_in
from jaxserve.server.responses.writer import ResponseWriter, new_response
from jaxserve.server.service import Service
from jaxserve.server.translated import renamed_fields


def add_responses(app: FastAPI, service: Service) -> None:
    config = service.config
    # Several fronts have a store each, and would find a response only by chance.
    store = Store(config.response_store_size if config.api_server_count <= 1 else 0)

    @app.post("/v1/responses", openapi_extra=body_schema(ResponsesBody))
    async def create(request: Request) -> Response:
        return await replied(request, _create(service, store, request))

    @app.post("/v1/responses/input_tokens", openapi_extra=body_schema(ResponsesBody))
    async def count(request: Request) -> Response:
        return await replied(request, _count(service, store, request))

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise InvalidValue("stream=true: stored responses are not streamed: leave it out", "stream")
        stored = store.get(request.state.client, response_id, "response_id")
        return Response(stored.response, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        store.delete(request.state.client, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/responses/{response_id}/input_items")
    async def items(request: Request, response_id: str) -> dict[str, Any]:
        stored = store.get(request.state.client, response_id, "response_id")
        inputs = _input_items(msgspec.json.decode(stored.given), response_id)
        if request.query_params.get("order") != "asc":
            inputs.reverse()
        return {
            "object": "list",
            "data": inputs,
            "has_more": False,
            "first_id": inputs[0]["id"] if inputs else None,
            "last_id": inputs[-1]["id"] if inputs else None,
        }

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        store.get(request.state.client, response_id, "response_id")
        raise InvalidValue(
            "only responses with background=true can be canceled, and this server has none", "background"
        )


async def _create(service: Service, store: Store, request: Request) -> Response:
    body = await service.read(request, ResponsesBody)
    check_body(body)
    if body.store and not store.enabled:
        why = "--api-server-count is above 1" if service.config.response_store_size else "--response-store-size is 0"
        raise InvalidValue(f"store=true: this server stores no responses, because {why}: leave it out", "store")
    client = request.state.client
    before = _before(store, client, body)
    messages = [*before, *await _messages(service, body)]
    tools = tools_in(body.tools)
    with renamed_fields(NAMES, [tool.place for tool in tools.values()]):
        chat = chat_of(body, messages, tools)
        answer = await prepared(service, request, chat)
    stored = store.enabled and body.store is not False

    def done(response: dict[str, Any]) -> None:
        if stored:
            own = messages_of_items(response["output"], "output")
            store.put(client, response, body.input, [*messages, *own])

    writer = ResponseWriter(new_response(body, answer, stored), done, tools)
    return await reply(service, request, answer, chat, writer, body.stream)


async def _count(service: Service, store: Store, request: Request) -> Response:
    """Return the number of tokens of an input, with what comes before it."""
    body = await service.read(request, ResponsesBody)
    check_body(body)
    service.check_model(body.model)
    messages = [*_before(store, request.state.client, body), *await _messages(service, body)]
    tools = tools_in(body.tools)
    with renamed_fields(NAMES, [tool.place for tool in tools.values()]):
        tokens = await counted(service, request, chat_of(body, messages, tools))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


PER_ITEM = 64  # characters that an item of an input counts as, at least


async def _messages(service: Service, body: ResponsesBody) -> list[Message]:
    size = len(body.input) * (1 if isinstance(body.input, str) else PER_ITEM)
    return await service.aside(lambda: messages_of_items(body.input), size)


def _before(store: Store, client: str, body: ResponsesBody) -> list[Message]:
    """Return the messages of the conversation that a request continues."""
    if body.previous_response_id is None:
        return []
    stored = store.get(client, body.previous_response_id, "previous_response_id")
    return msgspec.json.decode(stored.messages, type=list[Message])


def _input_items(given: str | list[Any], id: str) -> list[dict[str, Any]]:
    """Return the items of an input, each with an id and its type."""
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    shown = []
    for at, item in enumerate(items):
        item = {"type": "message", "id": f"{id.replace('resp', 'item')}_{at}", **item}
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
            item["content"] = [{"type": kind, "text": item["content"], **more}]
        shown.append({"status": "completed", **item})
    return shown
