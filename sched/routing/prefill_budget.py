"""Where the most prompt tokens can still be taken in on time: FairBatching's load balancer (PAB-LB)."""

from __future__ import annotations

from ..admission.prefill_budget import Promised
from ..api.instance_view import InstanceMemo, InstanceView
from ..api.request import Request
from .base import Fleet, Router
from .sent import Sent


class PrefillBudget(Router):
    """Rank instances by the prefill admission budget that is left for the request's TTFT once its prompt, less the
    instance's prefix-cache hit, is taken from it (arXiv 2510.14392, section 3.4). So are the
    prompts that it has sent and no instance has told of yet. Where budgets are equal, as all are for a request without
    a TTFT, the instance with the least prompt tokens to compute comes first."""

    def __init__(self) -> None:
        self._sent = Sent()
        self._promised = InstanceMemo(_promised)

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        left: dict[int, float] = {}
        behind: dict[int, int] = {}  # prompt tokens until it is computed
        for index in fleet.entries:
            one = fleet.instances[index]
            new = request.prompt_length - one.cached_tokens(request)
            left[index] = self._promised.of(one, fleet.now).budget(request.deadline, new) - new
            behind[index] = one.prefill_backlog + new
        for index, other in self._sent.unseen(fleet):
            if index not in left:
                continue  # its role has changed since, or a step of it hangs
            more = other.prompt_length - fleet.instances[index].cached_tokens(other)
            left[index], behind[index] = left[index] - more, behind[index] + more
        order = sorted(left, key=lambda index: (-left[index], behind[index], index))
        self._sent.add(order[0], request)
        return order


def _promised(one: InstanceView, start: float) -> Promised:
    return Promised(one.view(start, start))
