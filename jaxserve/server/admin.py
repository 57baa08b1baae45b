"""What an operator asks of a running server: the roles of its instances, its load and what it promises."""

from __future__ import annotations

import asyncio
from math import isfinite
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.policy import Role, roles_of
from jaxserve.server.openai import RolesBody


def present_roles(engine: Any) -> dict[str, Any]:
    """The answer to `GET /v1/admin/roles`: every instance with its role, and how much it has to do."""
    instances = [
        {"instance": index, "name": one.name, "role": one.role, "running": one.running, "waiting": one.waiting}
        for index, one in enumerate(engine.stats().instances)
    ]
    return {"object": "roles", "roles": [one["role"] for one in instances], "instances": instances}


async def change_roles(engine: Any, body: RolesBody) -> dict[str, Any]:
    """Change them, and answer as `present_roles` does. Raises InvalidValue, and changes nothing."""
    roles = _wanted(body, len(engine.stats().instances))
    await asyncio.to_thread(engine.set_roles, roles)  # waits for the engine's thread
    return present_roles(engine)


def present_load(engine: Any, active: int) -> dict[str, Any]:
    """The answer to `GET /load`: vLLM's `server_load`, which is HTTP requests that generate, requests that run and
    wait, and the objectives of requests that bring none."""
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
    return {"server_load": active, "running": stats.running, "waiting": stats.waiting, "objectives": objectives}


def _wanted(body: RolesBody, instances: int) -> dict[int, Role]:
    if body.roles is not None:
        if body.instance is not None or body.role is not None:
            raise InvalidValue("give either roles, or instance and role", "roles")
        return roles_of(body.roles, instances)
    if body.instance is None or body.role is None:
        missing = "role" if body.role is None and body.instance is not None else "instance"
        raise InvalidValue(f"{missing} is missing: give roles, one for each instance, or instance and role", missing)
    return roles_of({body.instance: body.role}, instances)
