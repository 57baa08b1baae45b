"""Largest remaining prefill admission budget first: FairBatching's load balancer (PAB-LB)."""

from __future__ import annotations

from ..admission.prefill_budget import Promised
from ..api.instance_view import InstanceMemo, InstanceView
from ..api.request import Request
from .base import Fleet, Router
from .sent import Sent


class PrefillBudget(Router):
    """A router that ranks instances by the prefill admission budget left after this prompt.

    The budget is for the TTFT of the request, and the prompt counts without its prefix-cache hit on
    the instance (arXiv 2510.14392, section 3.4). Prompts that were sent but do not show on their
    instance yet are subtracted too. Equal budgets, as for all requests without a TTFT, rank by the
    least prompt tokens to compute.
    """

    def __init__(self) -> None:
        self._sent = Sent()
        self._promised = InstanceMemo(_promised)

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        left: dict[int, float] = {}
        behind: dict[int, int] = {}  # prompt tokens to compute, including its own
        for index in fleet.entries:
            instance = fleet.instances[index]
            new = request.prompt_length - instance.cached_tokens(request)
            left[index] = self._promised.of(instance, fleet.now).budget(request.deadline, new) - new
            behind[index] = instance.prefill_backlog + new
        for index, other in self._sent.unseen(fleet):
            if index not in left:
                continue  # its role has changed since, or its step hangs
            more = other.prompt_length - fleet.instances[index].cached_tokens(other)
            left[index], behind[index] = left[index] - more, behind[index] + more
        order = sorted(left, key=lambda index: (-left[index], behind[index], index))
        self._sent.add(order[0], request)
        return order


def _promised(instance: InstanceView, start: float) -> Promised:
    return Promised(instance.view(start, start))
