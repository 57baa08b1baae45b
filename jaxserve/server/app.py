"""The HTTP routes: OpenAI's, vLLM's additions, administration, health and metrics."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from jaxserve.errors import JaxserveError
from jaxserve.server.admin import change_roles, present_load, present_replicas, present_roles, restart_replicas
from jaxserve.server.documented import body_schema, document
from jaxserve.server.failures import Refused, handler, response_of, routes_of, unrouted
from jaxserve.server.guard import Guard
from jaxserve.server.metrics import CONTENT_TYPE
from jaxserve.server.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RestartBody,
    RolesBody,
    Sampled,
    TokenizeBody,
    check_token,
    parse,
)
from jaxserve.server.service import Service
from jaxserve.server.sse import Disconnected, EventStream, while_connected
from jaxserve.version import __version__


def create_app(service: Service) -> FastAPI:
    """Create the ASGI application of a service."""
    app = FastAPI(title="jaxserve", version=__version__, description="LLM serving under latency objectives.")
    created = int(time.time())

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatBody)

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    async def complete(request: Request) -> Response:
        return await _answer(service, request, CompletionBody)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name, created) for name in service.config.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service, name, created)

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = parse(await request.body(), TokenizeBody)
        return JSONResponse(await while_connected(request.receive, _tokenize(service, body)))

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = parse(await request.body(), DetokenizeBody)
        service.check_model(body.model)
        for token in body.tokens:
            check_token(token, service.engine.info.vocab_size, "tokens")
        decoded = service.prompts.texts.run(lambda: service.tokenizer.decode(body.tokens), len(body.tokens))
        return JSONResponse({"prompt": await while_connected(request.receive, decoded)})

    _add_admin(app, service)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        _check_health(service)
        return Response(status_code=200)

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
    document(app)
    config = service.config
    app.add_middleware(
        Guard,
        keys=service.keys,
        max_body=config.max_body_size,
        draining=lambda: service.draining,
        protect=config.protect_metrics,
    )
    return app


def _add_admin(app: FastAPI, service: Service) -> None:
    """Add the routes below /v1/admin."""

    @app.get("/v1/admin/roles")
    async def roles() -> dict[str, Any]:
        await service.engine.refresh()
        return present_roles(service.engine)

    @app.post("/v1/admin/roles", openapi_extra=body_schema(RolesBody))
    async def turn(request: Request) -> dict[str, Any]:
        return await change_roles(service.engine, parse(await request.body(), RolesBody))

    @app.get("/v1/admin/replicas")
    async def replicas() -> dict[str, Any]:
        return present_replicas(service.rolling)

    @app.post("/v1/admin/replicas/restart", status_code=202, openapi_extra=body_schema(RestartBody))
    async def restart(request: Request) -> dict[str, Any]:
        body = parse(await request.body(), RestartBody)
        return restart_replicas(service.rolling, body, service.config.drain_timeout)


def _check_health(service: Service) -> None:
    """Raise Refused while the server drains or the engine is unhealthy."""
    if service.draining:
        raise Refused(503, "the server is shutting down", code="shutting_down")
    if (ailment := service.engine.ailment) is not None:
        raise Refused(503, ailment, code="unhealthy")


async def left(_: Request, error: Exception) -> Response:
    """Return the response for a client that has disconnected; it only sets the status in the access log."""
    return Response(status_code=499)


async def _answer(service: Service, request: Request, kind: type[Sampled]) -> Response:
    """Answer a completion request. All errors become responses here, so that none reaches uvicorn's 500 page."""
    try:
        body = parse(await request.body(), kind)
        preparing = service.prepare(body, request.headers, request.state.request_id, request.state.client)
        answer = await while_connected(request.receive, preparing, service.ending)
        if body.stream:
            return await EventStream.start(service.chunks(answer, body), request.receive, service.ending)
        return JSONResponse(await while_connected(request.receive, service.whole(answer), service.ending))
    except (Disconnected, ClientDisconnect) as error:
        return await left(request, error)
    except Exception as error:
        return response_of(error)


async def _tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    service.check_model(body.model)
    tokens = await service.prompts.tokenize(body)
    made = {"count": len(tokens), "max_model_len": service.engine.info.max_model_len, "tokens": tokens}
    made["token_strs"] = [service.tokenizer.piece(token) for token in tokens] if body.return_token_strs else None
    return made


def _model(service: Service, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxserve",
        "root": service.config.names[0],
        "parent": None,
        "max_model_len": service.engine.info.max_model_len,
    }
