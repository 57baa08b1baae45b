"""Admin and load routes: roles of the instances, restarts of replicas, the load, and the default objectives."""

from __future__ import annotations

import asyncio
from math import isfinite
from typing import Any

from fastapi import FastAPI, Request
from msgspec import to_builtins

from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.fleet.board import ask
from jaxserve.fleet.rolling import Rolling
from jaxserve.sched.api.policy import Role, roles_of
from jaxserve.server.documented import body_schema
from jaxserve.server.failures import Refused
from jaxserve.server.openai import RestartBody, RolesBody, ScaleBody, parse
from jaxserve.server.service import Service

LONGEST = 86400.0  # seconds that a replica may be given to finish its requests


def add_admin(app: FastAPI, service: Service) -> None:
    @app.get("/v1/admin/roles")
    async def roles() -> dict[str, Any]:
        await service.engine.refresh()
        return present_roles(service.engine)

    @app.post("/v1/admin/roles", openapi_extra=body_schema(RolesBody))
    async def turn(request: Request) -> dict[str, Any]:
        wanted = _wanted(parse(await request.body(), RolesBody), len(service.engine.stats().instances))
        await asyncio.to_thread(service.engine.set_roles, wanted)  # waits for the engine's thread
        return present_roles(service.engine)

    @app.get("/v1/admin/replicas")
    async def replicas() -> dict[str, Any]:
        return present_replicas(service.rolling)

    @app.post("/v1/admin/replicas/restart", status_code=202, openapi_extra=body_schema(RestartBody))
    async def restart(request: Request) -> dict[str, Any]:
        body = parse(await request.body(), RestartBody)
        return restart_replicas(service.rolling, body, service.config.drain_timeout)

    @app.post("/v1/admin/replicas/scale", status_code=202, openapi_extra=body_schema(ScaleBody))
    async def scale(request: Request) -> dict[str, Any]:
        return scale_replicas(service.rolling, parse(await request.body(), ScaleBody))


def present_roles(engine: Any) -> dict[str, Any]:
    """Return the response to `GET /v1/admin/roles`: the role and load of every instance."""
    instances = [
        {
            "instance": index,
            "name": instance.name,
            "role": instance.role,
            "running": instance.running,
            "waiting": instance.waiting,
        }
        for index, instance in enumerate(engine.stats().instances)
    ]
    return {"object": "roles", "roles": [instance["role"] for instance in instances], "instances": instances}


def present_replicas(rolling: Rolling | None) -> dict[str, Any]:
    """Return the response to `GET /v1/admin/replicas`: of each, its requests and why it takes none, if so."""
    if rolling is None:
        return {"object": "replicas", "replicas": [], "restart": None, "scaling": None}
    engines = rolling.replicas
    replicas = [
        {"replica": at, "name": name, "ready": ailment is None, "ailment": ailment, "requests": load}
        for at, (name, ailment, load) in zip(engines.engines, engines.members.standing(), strict=True)
    ]
    restart = {"running": rolling.running, "restarted": rolling.restarted}
    scaling = None if engines.board is None else to_builtins(engines.board.state())
    return {"object": "replicas", "replicas": replicas, "restart": restart, "scaling": scaling}


def scale_replicas(rolling: Rolling | None, body: ScaleBody) -> dict[str, Any]:
    """Ask for a number of replicas, and return `present_replicas`. Raises InvalidValue for one that is not allowed."""
    ask(None if rolling is None else rolling.replicas.board, body.replicas)
    return present_replicas(rolling)


def restart_replicas(rolling: Rolling | None, body: RestartBody, default: float) -> dict[str, Any]:
    """Begin to restart one replica after the other, and return `present_replicas`.

    Raises InvalidValue for a negative time or a single replica, Refused (409) while a restart is in progress.
    """
    patience = default if body.drain_timeout is None else body.drain_timeout
    if not 0 <= patience <= LONGEST:
        raise InvalidValue(f"drain_timeout={patience!r} must be 0 to {LONGEST:g} seconds", "drain_timeout")
    if rolling is None:
        raise InvalidValue("there are no replicas: serve with --replicas 2 or more", "replicas")
    try:
        rolling.start(patience)
    except InvalidValue:
        raise
    except JaxserveError as error:
        raise Refused(409, str(error), code="restart_in_progress") from None
    return present_replicas(rolling)


def present_load(engine: Any, active: int) -> dict[str, Any]:
    """Return the response to `GET /load`.

    It has vLLM's `server_load` (the HTTP requests that generate), the numbers of running and waiting
    requests, the objectives of requests that set none, and what each instance can still take.
    """
    stats, promise = engine.stats(), engine.info.promise
    objectives = {
        name: {
            "seconds": goal if isfinite(goal) else None,
            "auto": name in promise.automatic,
            "attainable": name not in promise.broken,
        }
        | ({"reason": promise.broken[name]} if name in promise.broken else {})
        for name, goal in (("ttft", promise.slo.ttft), ("tpot", promise.slo.tpot))
    }
    return {
        "server_load": active,
        "running": stats.running,
        "waiting": stats.waiting,
        "objectives": objectives,
        "instances": [_headroom(instance) for instance in stats.instances],
    }


def _headroom(slack: Any) -> dict[str, Any]:
    """Return what an instance can still take; null where nothing limits it."""
    room = slack.headroom
    return {
        "name": slack.name,
        "prefill_budget_tokens": {name: _finite(tokens) for name, tokens in room.budget.items()},
        "slack_seconds": _finite(room.slack),
        "prefill_queue_seconds": _finite(room.queue),
        "predicted_ttft_seconds": _finite(room.ttft),
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _wanted(body: RolesBody, instances: int) -> dict[int, Role]:
    if body.roles is not None:
        if body.instance is not None or body.role is not None:
            raise InvalidValue("give either roles, or instance and role", "roles")
        return roles_of(body.roles, instances)
    if body.instance is None or body.role is None:
        missing = "role" if body.role is None and body.instance is not None else "instance"
        raise InvalidValue(f"{missing} is missing: give roles, one for each instance, or instance and role", missing)
    return roles_of({body.instance: body.role}, instances)
