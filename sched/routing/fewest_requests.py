"""Where the fewest requests are: vLLM's balancer between data-parallel engines, the baseline of FairBatching's."""

from __future__ import annotations

from ..api.request import Request
from .base import Fleet, Router
from .sent import Sent

WAITING = 4  # running ones that a waiting one counts for, as in vLLM


class FewestRequests(Router):
    """Counts requests, those that wait four times, whatever their length (FairBatching, arXiv 2510.14392, section
    3.4). What it has sent and no instance has told of yet counts as waiting."""

    def __init__(self) -> None:
        self._sent = Sent()

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        score = {index: self._score(index, fleet) for index in fleet.entries}
        for index, _ in self._sent.unseen(fleet):
            if index in score:  # its role may have changed since, or a step of it may hang
                score[index] += WAITING
        order = sorted(score, key=lambda index: (score[index], index))
        self._sent.add(order[0], request)
        return order

    def _score(self, index: int, fleet: Fleet) -> int:
        one = fleet.instances[index]
        return WAITING * one.waiting + one.running
