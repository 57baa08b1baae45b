"""AdmitAll is let in."""

from __future__ import annotations

from ..api.request import Request
from ..instance.scheduler import Scheduler


class AdmitAll:
    refuse = False

    def admits(self, request: Request, scheduler: Scheduler, now: float) -> bool:
        return True
