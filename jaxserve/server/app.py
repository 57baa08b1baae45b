"""The HTTP routes: OpenAI's, vLLM's additions, administration, health and metrics."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidValue, JaxserveError, short
from jaxserve.generation.pieces import Pieces
from jaxserve.generation.sharing import session_of
from jaxserve.server.admin import add_admin, present_load
from jaxserve.server.dashboard import add_dashboard
from jaxserve.server.documented import body_schema, document
from jaxserve.server.embeddings import add_pooling
from jaxserve.server.failures import Refused, handler, routes_of, unrouted
from jaxserve.server.guard import Guard, cors_of
from jaxserve.server.messages.request import CountBody, MessagesBody
from jaxserve.server.messages.routes import add_messages
from jaxserve.server.metrics import CONTENT_TYPE
from jaxserve.server.model_list import present_model, present_models
from jaxserve.server.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampled,
    TokenizeBody,
    check_token,
)
from jaxserve.server.operations import add_operations
from jaxserve.server.replies import left, prepared, replied
from jaxserve.server.responses.request import ResponsesBody
from jaxserve.server.responses.routes import add_responses
from jaxserve.server.service import Service
from jaxserve.server.sse import Disconnected, EventStream, while_connected
from jaxserve.version import __version__


def create_app(service: Service, created: int | None = None) -> FastAPI:
    """Create the ASGI application of a service. created: Unix time of the model's entry; None: now."""
    app = FastAPI(title="jaxserve", version=__version__, description="LLM serving under latency objectives.")
    created = int(time.time()) if created is None else created

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    async def chat(request: Request) -> Response:
        return await replied(request, _answer(service, request, ChatBody))

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    async def complete(request: Request) -> Response:
        return await replied(request, _answer(service, request, CompletionBody))

    add_responses(app, service)
    add_messages(app, service)

    add_pooling(app, service)

    @app.delete("/v1/sessions/{session_id:path}")
    async def end(session_id: str, request: Request) -> dict[str, Any]:
        """Release the pages that a session of this client keeps between turns. 404 if it keeps none."""
        session = session_of(request.state.client, session_id, {})
        if not await asyncio.to_thread(service.engine.end_session, session):
            raise Refused(404, f"session_id={short(session_id)} keeps no pages", "session_id", code="not_found")
        return {"id": session_id, "object": "session", "deleted": True}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return present_models(service.config, service.engine.info.max_model_len, created, service.sampling_defaults)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return present_model(
            service.config, name, service.engine.info.max_model_len, created, service.sampling_defaults
        )

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await service.read(request, TokenizeBody)
        return JSONResponse(await while_connected(request.receive, _tokenize(service, body)))

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await service.read(request, DetokenizeBody)
        return JSONResponse(await while_connected(request.receive, _detokenize(service, body)))

    add_admin(app, service)
    add_operations(app, service)
    if service.config.dashboard:
        add_dashboard(app, service)

    @app.get("/load")
    async def load() -> dict[str, Any]:
        await service.engine.refresh()
        return present_load(service.engine, service.active)

    @app.get("/metrics")
    async def metrics() -> Response:
        await service.engine.refresh()
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    app.add_exception_handler(HTTPException, partial(unrouted, routes_of(app)))
    app.add_exception_handler(JaxserveError, handler)
    for gone in (Disconnected, ClientDisconnect):
        app.add_exception_handler(gone, left)
    document(app, ResponsesBody, MessagesBody, CountBody)
    config = service.config
    app.add_middleware(
        Guard,
        keys=service.keys,
        max_body=config.max_body_size,
        draining=lambda: service.draining,
        protect=config.protect_metrics,
    )
    if config.origins:  # outside of the guard, so that its refusals reach web pages too
        app.add_middleware(CORSMiddleware, **cors_of(config))
    return app


async def _answer(service: Service, request: Request, kind: type[Sampled]) -> Response:
    body = await service.read(request, kind)
    answer = await prepared(service, request, body)
    if body.stream:
        return await EventStream.start(service.chunks(answer, body), request.receive, service.ending)
    return JSONResponse(await while_connected(request.receive, service.whole(answer), service.ending))


async def _tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    service.check_model(body.model)
    tokens = await service.prompts.tokenize(body)
    answer = {"count": len(tokens), "max_model_len": service.engine.info.max_model_len, "tokens": tokens}
    answer["token_strs"] = Pieces(service.tokenizer, False).texts(tokens) if body.return_token_strs else None
    return answer


async def _detokenize(service: Service, body: DetokenizeBody) -> dict[str, str]:
    service.check_model(body.model)
    if (count := len(body.tokens)) > (most := service.engine.info.max_model_len):
        raise InvalidValue(f"tokens has {count} entries: at most {most}, the context length, are allowed", "tokens")

    def decode() -> str:
        for token in body.tokens:
            check_token(token, service.engine.info.vocab_size, "tokens")
        return service.tokenizer.decode(body.tokens)

    return {"prompt": await service.prompts.texts.run(decode, count)}
