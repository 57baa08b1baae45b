"""What of a Scheduler lets requests and their KV move between instances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..api.acceptance import Acceptance
from ..api.log import Log
from ..api.policy import Role
from ..api.request import Request, State
from .block_pool import BlockManager
from .kv_manager import Memory, Reservation, Returned
from .request_queues import Roster
from .stats import Counters
from .step_builder import reserve


class Moves(ABC):
    """The inputs of a Scheduler that concern other instances, or what its own is for. Writer: as of the Scheduler."""

    counters: Counters
    hung = False  # its oldest step does not end: nothing new comes here
    _drafts: Acceptance
    _log: Log
    _roster: Roster
    _memory: Memory
    _reservations: dict[int, Reservation]

    @property
    @abstractmethod
    def blocks(self) -> BlockManager: ...

    @property
    @abstractmethod
    def prefill_backlog(self) -> int: ...

    def reserved(self, reservation: Reservation) -> bool:
        """Whether a reservation still stands."""
        return self._reservations.get(reservation.request) is reservation

    def reserve(self, request: Request) -> Reservation | None:
        """Set pages and a slot aside for a request whose prompt another instance computes."""
        self._log("reserve", id=request.id)
        if request.id in self._reservations or any(one.comes_back for one in self._roster.requests.values()):
            return None  # an earlier move still ends here; those whose KV was dropped here come back first
        reservation, dropped = reserve(request, self._roster, self._memory, len(self._reservations))
        self._roster.refresh_hits()
        self.counters.preemptions += dropped
        if reservation is not None:
            self._reservations[request.id] = reservation
        return reservation

    def unreserve(self, reservation: Reservation) -> None:
        """Give a reservation back; nothing where a step that raised has already taken it."""
        if self.reserved(reservation):
            self.unreserve_id(reservation.request)

    def unreserve_id(self, id: int) -> None:
        """Give the standing reservation of a request back."""
        self._log("unreserve", id=id)
        self._memory.release(self._reservations.pop(id))

    def disown(self, id: int) -> Request:
        """Let a request go whose KV has been taken elsewhere."""
        self._log("disown", id=id)
        request = self._roster.requests.pop(id)
        self._roster.unfile(request)
        computed = request.computed
        self._memory.vacate(request)
        request.computed = computed
        return request

    def adopt(self, request: Request, first_token_at: float | None = None) -> None:
        """Take over a request whose KV has arrived in the pages reserved for it.

        `first_token_at` is given where the first token counts only now (`--first-token decode`).
        """
        self._log("adopt", id=request.id, first_token_at=first_token_at)
        if first_token_at is not None and len(request.output) == 1:
            request.first_token_at = request.token_times[0] = first_token_at
        self._memory.occupy(request, self._reservations.pop(request.id))
        self._roster.refresh_hits()
        request.state = State.RUNNING
        request.drafted = self._drafts.record(request.tier, request.drafted)
        self._roster.requests[request.id] = request
        self._roster.file(request)

    def receive(self, id: int, digests: Sequence[bytes]) -> Returned | None:
        """Set pages aside for KV that comes back (giveback.py); None where those that wait may want them."""
        wanted = len(self._roster.decode) + self.blocks.count(self.prefill_backlog)
        returned = self._memory.receive(id, digests, wanted)
        self._roster.refresh_hits()
        return returned

    def keep(self, id: int, arrived: bool) -> None:
        """The KV that came back, or did not, is nobody's."""
        self._memory.keep(id, arrived)
        self._roster.refresh_hits()

    def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes that no request holds."""
        self._log("reset_prefix_cache")
        self.blocks.forget_idle()
        self._roster.refresh_hits()

    def hang(self, hung: bool) -> None:
        """Take note that the oldest step does not end, or has ended after all."""
        self._log("hang", hung=hung)
        self.hung = hung

    def turn(self, role: Role, first_token_at: float | None = None) -> None:
        """Change what the instance is for. Nobody here loses anything: what was to be decoded elsewhere decodes here
        where the instance prefills no more, and what decodes goes on until there is room for it elsewhere (`leave`).

        `first_token_at` is given where the first token counts only when its KV stands where it is decoded.
        """
        self._log("turn", role=role.value, first_token_at=first_token_at)
        for request in self._roster.turn(role):
            if first_token_at is not None and len(request.output) == 1:
                request.first_token_at = request.token_times[0] = first_token_at

    def stay(self, id: int, first_token_at: float | None = None) -> None:
        """There is no room elsewhere for a request whose prompt is done: it decodes here until there is (`leave`).

        `first_token_at` is given where the first token counts only when its KV stands where it is decoded.
        """
        self._log("stay", id=id, first_token_at=first_token_at)
        request = self._roster.requests[id]
        if first_token_at is not None and len(request.output) == 1:
            request.first_token_at = request.token_times[0] = first_token_at
        request.state, request.stays = State.RUNNING, True
        self._roster.file(request)

    def leave(self, id: int) -> None:
        """There is room elsewhere for a row that decodes here: it is planned no more, and moves when what is submitted
        of it has ended."""
        self._log("leave", id=id)
        request = self._roster.requests[id]
        request.stays = False
        if request.remaining == 1 and not request.inflight:
            request.state = State.HANDOVER
        self._roster.file(request)
