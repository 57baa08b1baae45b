"""Admin and load routes: the roles of the instances, the load, and the default objectives."""

from __future__ import annotations

import asyncio
from math import isfinite
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.policy import Role, roles_of
from jaxserve.server.openai import RolesBody


def present_roles(engine: Any) -> dict[str, Any]:
    """Return the response to `GET /v1/admin/roles`: the role and load of every instance."""
    instances = [
        {"instance": index, "name": one.name, "role": one.role, "running": one.running, "waiting": one.waiting}
        for index, one in enumerate(engine.stats().instances)
    ]
    return {"object": "roles", "roles": [one["role"] for one in instances], "instances": instances}


async def change_roles(engine: Any, body: RolesBody) -> dict[str, Any]:
    """Change roles and return `present_roles`. Raises InvalidValue without changing any role."""
    roles = _wanted(body, len(engine.stats().instances))
    await asyncio.to_thread(engine.set_roles, roles)  # waits for the engine's thread
    return present_roles(engine)


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
        "instances": [_headroom(one) for one in stats.instances],
    }


def _headroom(one: Any) -> dict[str, Any]:
    """Return what an instance can still take; null where nothing limits it."""
    room = one.headroom
    return {
        "name": one.name,
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
