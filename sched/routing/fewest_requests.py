"""Fewest requests first: vLLM's balancer of data-parallel engines, the baseline in the FairBatching paper."""

from __future__ import annotations

from ..api.perf import Array
from ..api.request import Request
from .base import Fleet, Router, Scalars
from .sent import Sent

WAITING = 4  # weight of a waiting request, relative to a running one, as in vLLM


class FewestRequests(Router):
    """A router that counts requests, waiting ones four times, whatever their length.

    See FairBatching (arXiv 2510.14392), section 3.4. Requests that were sent but do not show on
    their instance yet count as waiting.
    """

    def __init__(self) -> None:
        self._sent = Sent()

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        score = {index: self._score(index, fleet) for index in fleet.entries}
        for index, _ in self._sent.unseen(fleet):
            if index in score:  # otherwise its role has changed since, or its step hangs
                score[index] += WAITING
        order = sorted(score, key=lambda index: (score[index], index))
        self._sent.add(order[0], request)
        return order

    def estimate(self, request: Request, scalars: Scalars) -> Array:
        score: Array = WAITING * scalars.waiting + scalars.running
        return score

    def _score(self, index: int, fleet: Fleet) -> int:
        instance = fleet.instances[index]
        return WAITING * instance.waiting + instance.running
