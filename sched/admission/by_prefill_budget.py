"""Admission by FairBatching's prefill admission budget (arXiv 2510.14392, section 3.4)."""

from __future__ import annotations

from ..api.instance_view import InstanceView
from ..api.request import Request
from .prefill_budget import prefill_budget


class ByPrefillBudget:
    """An admission control that admits prompts within the prefill admission budget of their instance.

    The prompt counts without its prefix hit, and the budget is for its own TTFT. `refuse`: refuse
    the others, so that they can go elsewhere, instead of making them best effort.
    """

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse

    def admits(self, request: Request, instance: InstanceView, now: float) -> bool:
        new = request.prompt_length - instance.cached_tokens(request)
        return new <= prefill_budget(instance.view(now, max(now, instance.ends)), request.deadline, new)
