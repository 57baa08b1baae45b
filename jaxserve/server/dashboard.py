"""The dashboard: a page at /, and the routes that it reads. See docs/guide/dashboard.md."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import short
from jaxserve.report.dashboard_page import PREFIX
from jaxserve.report.request_timeline import request_timeline
from jaxserve.report.snapshot_form import number
from jaxserve.server.door import page_response
from jaxserve.server.failures import Refused, wrong
from jaxserve.server.live import Encoded, life_of, present_requests
from jaxserve.server.service import Service
from jaxserve.server.sse import EventStream, while_connected

MOST = 500  # requests of a list
FRESH = {"Cache-Control": "no-store"}  # what a key has shown stays neither in a browser nor in a proxy


def add_dashboard(app: FastAPI, service: Service) -> None:
    feed = service.live

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    @app.get(PREFIX + "{name}", include_in_schema=False)
    async def page(request: Request) -> Response:
        """Return a file of the page."""
        response = page_response(request.url.path, service.config)
        if response is None:
            raise Refused(404, f"the page has no file {short(request.url.path)}", code="not_found")
        return response

    @app.get("/v1/live")
    async def live(request: Request) -> Response:
        """Stream snapshots of the server as server-sent events; `server/snapshot.py` says what is in them."""
        viewer = feed.join(feed.client(request.state.client))
        return await EventStream.start(feed.stream(viewer), request.receive, viewer.ended, Encoded())

    @app.get("/v1/requests")
    async def requests(request: Request, limit: str = "100") -> Response:
        """List the latest ended requests of this client, newest first."""
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= MOST):
            raise wrong("limit", limit, f"must be 1 to {MOST}")
        listed = await present_requests(service.engine, feed.client(request.state.client), int(limit))
        return JSONResponse(listed, headers=FRESH)

    @app.get("/v1/requests/{id}")
    async def timeline(id: str, request: Request) -> Response:
        """Return what happened to one request, in bars and in words."""
        finding = life_of(service.engine, id, feed.client(request.state.client))
        life = await while_connected(request.receive, finding, service.ending)
        work = service.prompts.texts.run(lambda: request_timeline(life.recorder(), life.id), 100 * len(life.steps))
        told = await while_connected(request.receive, work)
        predicted = None if life.predicted is None else number(life.predicted)
        return JSONResponse({**told, "id": id, "predicted_ttft": predicted}, headers=FRESH)
