"""Whether an instance can keep a new request's SLO: admit it, or make it best effort, or refuse it."""

from __future__ import annotations

from typing import Protocol

from ..api.request import Request
from ..instance.scheduler import Scheduler
from ..registry import build

ADMISSIONS = {"dp": "dp:ByDP", "none": "none:AdmitAll", "pab": "by_prefill_budget:ByPrefillBudget"}


class Admission(Protocol):
    """Asked once per request, of the instance that router chose."""

    refuse: bool  # what is not admitted is refused; otherwise it becomes best effort

    def admits(self, request: Request, scheduler: Scheduler, now: float) -> bool: ...


def make(name: str) -> Admission:
    """A new admission by name, as in `pab` or `pab:refuse`. Raises InvalidValue naming what is allowed."""
    admission: Admission = build(ADMISSIONS, name, "admission", __package__)
    return admission
