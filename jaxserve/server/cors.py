"""Cross-origin requests: web pages of `--allowed-origins` may call the server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jaxserve.settings.operations import OperationSettings, listed


def allow_origins(app: FastAPI, settings: OperationSettings) -> None:
    """Answer preflight requests, and name the allowed origins in responses; without origins, do neither."""
    if settings.origins:
        app.add_middleware(CORSMiddleware, **_options(settings))


def within_origins(app: ASGIApp, settings: OperationSettings) -> ASGIApp:
    """Return an ASGI application that does for `app` what `allow_origins` does."""
    return CORSMiddleware(app, **_options(settings)) if settings.origins else app


def _options(settings: OperationSettings) -> dict[str, Any]:
    return {
        "allow_origins": settings.origins,
        "allow_credentials": settings.allow_credentials,
        "allow_methods": listed(settings.allowed_methods, "allowed_methods"),
        "allow_headers": listed(settings.allowed_headers, "allowed_headers"),
        "expose_headers": ("X-Request-Id", "Retry-After"),
    }
