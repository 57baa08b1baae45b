"""Identification of the faulty request in a step that raised."""

from __future__ import annotations

from ..api.policy import Decision, Grant
from ..api.request import Request, State
from .kv_manager import KVManager
from .request_queues import RequestQueues


class Trials:
    """The requests of failed steps, which run before all others, each alone and up to where it was.

    Those with the fewest generated tokens go first, ties by latest arrival. A faulty request
    usually fails in its first steps, so it is found before the others have recomputed KV that a
    second failure would destroy. Writer: the Scheduler.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request, end: int) -> None:
        """Record that a step raised that would have computed a request up to `end`."""
        request.failures += 1
        request.trial = max(request.trial, end)
        if request not in self._requests:
            self._requests.append(request)
        self._requests.sort(key=lambda suspect: (len(suspect.output), -suspect.arrival, suspect.id))

    @staticmethod
    def passed(request: Request, end: int) -> None:
        """Record that a step that computed a request up to `end` did not raise."""
        if end >= request.trial:
            request.failures = request.trial = 0

    def decide(self, queues: RequestQueues, memory: KVManager, tokens: int) -> Decision | None:
        """Return the next trial, in steps of at most `tokens` tokens.

        None lets the policy decide: either all requests have passed, or the next one cannot get
        pages and a slot until others release theirs.
        """
        while self._requests and not self._stands(self._requests[0], queues):
            del self._requests[0]
        if not self._requests:
            return None
        request = self._requests[0]
        if request.inflight or request.suspended:
            return Decision()
        blocks, more = memory.blocks, memory.blocks.count(request.known + 1) - len(request.pages)
        fits = more + len(queues.decode) <= blocks.available and (request.slot is not None or memory.free_slots > 0)
        return Decision((Grant(request.id, tokens),)) if fits and queues.runnable(request.id) else None

    def _stands(self, request: Request, queues: RequestQueues) -> bool:
        here = queues.requests.get(request.id) is request
        return here and request.failures > 0 and request.state in (State.WAITING, State.RUNNING)
