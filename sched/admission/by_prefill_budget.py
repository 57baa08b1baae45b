"""Admission by FairBatching's prefill admission budget (arXiv 2510.14392, section 3.4)."""

from __future__ import annotations

from ..api.instance_view import InstanceView
from ..api.request import Request
from .prefill_budget import prefill_budget


class ByPrefillBudget:
    """Admits a prompt that, prefix hit aside, is no longer than the budget of its instance for its own TTFT. refuse:
    turn others away, so that they can go elsewhere; otherwise they become best effort."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse

    def admits(self, request: Request, instance: InstanceView, now: float) -> bool:
        new = request.prompt_length - instance.cached_tokens(request)
        return new <= prefill_budget(instance.view(now, max(now, instance.ends)), request.deadline, new)
