"""Admission by FairBatching's prefill admission budget (arXiv 2510.14392, section 3.4)."""

from __future__ import annotations

from ..api.request import Request
from ..instance.scheduler import Scheduler
from .prefill_budget import prefill_budget


class ByPrefillBudget:
    """Admits a prompt that, prefix hit aside, is no longer than the budget of its instance for its own TTFT. refuse:
    turn others away, so that they can go elsewhere; otherwise they become best effort."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse

    def admits(self, request: Request, scheduler: Scheduler, now: float) -> bool:
        new = request.prompt_length - scheduler.cached_tokens(request)
        return new <= prefill_budget(scheduler.view(now, max(now, scheduler.ends)), request.deadline, new)
