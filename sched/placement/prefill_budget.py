"""Where the most prompt tokens can still be taken in on time: FairBatching's load balancer (PAB-LB)."""

from __future__ import annotations

from ..pab import prefill_budget
from ..request import Request
from . import Fleet, Placement


class PrefillBudget(Placement):
    """Ranks instances by what their prefill admission budget (pab.py) for the request's own TTFT leaves once its
    prompt, after each instance's own prefix-cache hit, is taken from it (arXiv 2510.14392, section 3.4)."""

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        def left(index: int) -> float:
            one = fleet.instances[index]
            new = request.prompt_length - one.cached_tokens(request)
            view = one.view(fleet.now, max(fleet.now, one.ends))
            return prefill_budget(view, request.deadline, new) - new

        left_of = {index: left(index) for index in fleet.entries}
        return sorted(left_of, key=lambda index: (-left_of[index], index))
