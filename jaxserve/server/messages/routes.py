"""The routes below /v1/messages."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from jaxserve.server.documented import body_schema
from jaxserve.server.failures import wrong
from jaxserve.server.messages.errors import anthropic_response
from jaxserve.server.messages.request import NAMES, CountBody, MessagesBody, chat_of, own_tools
from jaxserve.server.messages.writer import MessageWriter, new_message
from jaxserve.server.replies import counted, prepared, replied, reply
from jaxserve.server.service import Service
from jaxserve.server.translated import renamed_fields

OLDEST = "2023-06-01"  # version of Anthropic's API whose streams have named events


def add_messages(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", openapi_extra=body_schema(MessagesBody))
    async def create(request: Request) -> Response:
        return await _replied(request, _create(service, request))

    @app.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountBody))
    async def count(request: Request) -> Response:
        return await _replied(request, _count(service, request))


async def _replied(request: Request, answer: Awaitable[Response]) -> Response:
    return await replied(request, answer, partial(anthropic_response, request_id=request.state.request_id))


def _check_version(request: Request) -> None:
    """Raise InvalidValue for a version of the API whose streams differ. Clients may leave it out."""
    given = request.headers.get("anthropic-version", OLDEST)
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", given) or given < OLDEST:
        raise wrong("anthropic-version", given, f"must be {OLDEST} or a later date")


async def _create(service: Service, request: Request) -> Response:
    _check_version(request)
    body = await service.read(request, MessagesBody)
    with renamed_fields(NAMES, list(own_tools(body))):
        chat = chat_of(body)
        answer = await prepared(service, request, chat)
    writer = MessageWriter(new_message(answer), request.state.request_id)
    return await reply(service, request, answer, chat, writer, body.stream)


async def _count(service: Service, request: Request) -> Response:
    _check_version(request)
    body = await service.read(request, CountBody)
    service.check_model(body.model)
    with renamed_fields(NAMES, list(own_tools(body))):
        return JSONResponse({"input_tokens": await counted(service, request, chat_of(body))})
