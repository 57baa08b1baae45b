"""The registry of routers, one file each."""

from __future__ import annotations

from ..admission.base import Admission
from ..admission.none import AdmitAll
from ..registry import build
from .base import Router

ROUTERS = {
    "deflect": "deflect:Deflect",
    "fewest_requests": "fewest_requests:FewestRequests",
    "least_work": "least_work:LeastWork",
    "next_replica": "next_replica:NextReplica",
    "prefill_budget": "prefill_budget:PrefillBudget",
    "round_robin": "round_robin:RoundRobin",
    "unified": "unified:Unified",
}


def make(name: str, admission: Admission | None = None, *, what: str = "routing") -> Router:
    """Create a router by name, with options after colons. Raises InvalidValue naming what is allowed.

    `admission` is the control that will be asked about the chosen instance, for routers that ask it
    ahead. `what`: the setting that errors name.
    """
    router: Router = build(ROUTERS, name, what, __package__, admission=admission or AdmitAll())
    return router
