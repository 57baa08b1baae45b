"""Routes for operators: probes, what is served with which settings, the prefix cache, and profiles."""

from __future__ import annotations

import asyncio
import dataclasses
import platform
import sys
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from jaxserve.fleet.replicas import Replicas
from jaxserve.server.failures import Refused
from jaxserve.server.service import Service
from jaxserve.server.sse import while_connected
from jaxserve.server.start_times import version_of
from jaxserve.version import __version__

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "uvicorn", "fastapi")


def add_operations(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        return _ready(service)

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz() -> Response:
        """Answer 200 if requests can be sent here, like /health."""
        return _ready(service)

    @app.post("/ping", include_in_schema=False)
    @app.get("/ping")
    async def ping() -> Response:
        """Answer like /health, under the name that SageMaker probes."""
        return _ready(service)

    @app.head("/livez", include_in_schema=False)
    @app.get("/livez")
    async def livez() -> Response:
        """Answer 503 only if nothing but a restart of this process helps: its own engine has failed."""
        if not isinstance(service.engine, Replicas) and (ailment := service.engine.ailment) is not None:
            raise Refused(503, ailment, code="unhealthy")
        return Response(status_code=200)

    @app.get("/server_info")
    async def server_info() -> Response:
        return JSONResponse(present_server(service))

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        described = service.prompts.texts.run(service.tokenizer.described, 0)
        return JSONResponse(await while_connected(request.receive, described))

    @app.post("/reset_prefix_cache")
    async def reset() -> dict[str, Any]:
        """Empty the prefix caches. 409 while requests run or wait, which hold pages."""
        if not await asyncio.to_thread(service.engine.reset_prefix_cache):
            raise Refused(409, "the prefix cache was not emptied: requests run or wait", code="busy", retry_after=1.0)
        return {"object": "prefix_cache", "reset": True}

    @app.post("/start_profile")
    async def start_profile() -> dict[str, Any]:
        """Begin a trace of every engine's process."""
        return await _profile(service, True)

    @app.post("/stop_profile")
    async def stop_profile() -> dict[str, Any]:
        """End the traces, and write them to --profile-dir."""
        return await _profile(service, False)


async def _profile(service: Service, on: bool) -> dict[str, Any]:
    folder = service.config.profile_dir
    if folder is None:
        raise Refused(403, "profiles are off: start the server with --profile-dir PATH", code="profile_off")
    await asyncio.to_thread(service.engine.profile, on)
    return {"object": "profile", "running": on, "folder": folder}


def _ready(service: Service) -> Response:
    """Return 200. Raises Refused (503) while the server drains or the engine is unhealthy."""
    if service.draining:
        raise Refused(503, "the server is shutting down", code="shutting_down")
    if (ailment := service.engine.ailment) is not None:
        raise Refused(503, ailment, code="unhealthy")
    return Response(status_code=200)


def present_server(service: Service) -> dict[str, Any]:
    """Return the response to `GET /server_info`: settings without keys, the engine's instances, and versions."""
    info, config = service.engine.info, service.config
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.repr  # `repr` is off for secrets
    }
    instances = [
        {
            "name": instance.name,
            "role": instance.role,
            "devices": [str(device) for device in instance.devices],
            "pages": instance.pages,
            "page_size": instance.page_size,
        }
        for instance in info.instances
    ]
    return {
        "object": "server_info",
        "version": __version__,
        "settings": {name: _plain(value) for name, value in settings.items()},
        "engine": {
            "model": config.names[0],
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "policy": info.policy,
            "routing": info.routing,
            "attention": info.attention,
            "startup_seconds": info.startup_seconds,
            "instances": instances,
        },
        "system": {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "packages": {name: version_of(name) for name in PACKAGES},
        },
    }


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it; infinite times become "inf", as in files of settings."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
