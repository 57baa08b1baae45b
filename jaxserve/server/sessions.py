"""Sessions over HTTP: DELETE /v1/sessions/{session_id}."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request

from jaxserve.errors import short
from jaxserve.generation.sharing import session_of
from jaxserve.server.failures import Refused
from jaxserve.server.service import Service


def add_sessions(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.delete("/v1/sessions/{session_id:path}")
    async def end(session_id: str, request: Request) -> dict[str, Any]:
        """Release the pages that a session of this client keeps between turns. 404 if it keeps none."""
        name = session_of(request.state.client, session_id, {})
        if not await asyncio.to_thread(service.engine.end_session, name):
            raise Refused(404, f"session_id={short(session_id)} keeps no pages", "session_id", code="not_found")
        return {"id": session_id, "object": "session", "deleted": True}
