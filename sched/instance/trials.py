"""Find the request at fault among those of a step that raised."""

from __future__ import annotations

from ..api.policy import Decision, Grant
from ..api.request import Request, State
from .kv_manager import KVManager
from .request_queues import RequestQueues


class Trials:
    """The requests of a step that raised run before any other, each alone and up to where it was.

    Those that have generated the fewest tokens go first, of these the latest arrival: a request that is at fault mostly
    is so in its first steps, and then no other has KV that a second failure would cost. Writer: the Scheduler.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request, end: int) -> None:
        """A step raised that would have computed a request up to `end`."""
        request.failures += 1
        request.trial = max(request.trial, end)
        if request not in self._requests:
            self._requests.append(request)
        self._requests.sort(key=lambda one: (len(one.output), -one.arrival, one.id))

    @staticmethod
    def passed(request: Request, end: int) -> None:
        """A step that computed a request up to `end` did not raise."""
        if end >= request.trial:
            request.failures = request.trial = 0

    def decide(self, queues: RequestQueues, memory: KVManager, tokens: int) -> Decision | None:
        """What runs next, in steps of at most so many tokens. None where the policy decides: all have passed, or the
        next cannot get its pages and its slot before others give theirs back."""
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
