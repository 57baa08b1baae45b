"""Which requests an instance has, and which of them a policy may choose from."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request, State
from .prefix_hits import PrefixHits
from .table import Key, Table, key
from .waiting_room import WaitingRoom


class Roster:
    """The requests of one instance, filed in two tables by what they need next. Writer: the Scheduler.

    `prefill` has those with prompt work (or dropped KV to compute again), `decode` those with one token left.
    A request that must wait for a result, or for another instance, is in neither. `hits` watches those that wait. Of
    best effort at most `shown` requests that wait are in `prefill`, the first by order of service; further ones are in
    `room`, where no policy looks.
    """

    def __init__(self, role: Role, hits: PrefixHits, shown: int = 1 << 30) -> None:
        self.role = role
        self.hits = hits
        self.room = WaitingRoom()
        self._shown = shown
        self._seen: dict[int, Request] = {}  # waiting best effort in `prefill`
        self._order: list[Key] = []  # the keys of these
        self.requests: dict[int, Request] = {}
        self.prefill = Table()
        self.decode = Table()
        self._filed: dict[int, Table] = {}

    @property
    def seen_as(self) -> Role:
        """What a policy is told: where rows still decode on an instance that prefills, it has both to do."""
        return Role.MIXED if self.role is Role.PREFILL and len(self.decode) else self.role

    def runnable(self, id: int) -> bool:
        return id in self._filed

    @property
    def backlog(self) -> int:
        """Prompt tokens to compute, less what is expected to be found in the prefix cache."""
        return self.prefill.backlog + self.room.backlog

    def file(self, request: Request) -> None:
        """Put a request into the table it belongs to now, or take over what has changed."""
        spare = request.state is State.WAITING and request.tier == BEST_EFFORT
        if spare and request.id not in self._seen:
            if request.id in self.room or not self._show(request):
                return
        elif not spare:
            self._forget(request)
        self._put(request)
        if not spare:
            self._reveal()

    def _put(self, request: Request) -> None:
        table, before = self._belongs(request), self._filed.get(request.id)
        if table is not before:
            self._take_out(request)
        self._watch(request)
        if table is before and table is not None:
            table.refresh(request)
        elif table is not None:
            table.add(request)
            self._filed[request.id] = table

    # waiting best effort

    def _show(self, request: Request) -> bool:
        """Whether a request that begins to wait is among the first. The last of them makes room for it, or else it
        goes to the room itself."""
        if len(self._order) >= self._shown:
            if key(request) > self._order[-1]:
                self._take_out(request)
                self.room.add(request)
                return False
            last = self._seen[self._order[-1][3]]
            self._forget(last)
            self._take_out(last)
            self.room.add(last)
        self._seen[request.id] = request
        insort(self._order, key(request))
        return True

    def _forget(self, request: Request) -> None:
        """A request does not wait with best effort, or not any more."""
        if self._seen.pop(request.id, None) is not None:
            del self._order[bisect_left(self._order, key(request))]
        elif self.room:
            self.room.discard(request)

    def _reveal(self) -> None:
        """The next ones of the room take the places of those that went."""
        while len(self._order) < self._shown and (request := self.room.first()) is not None:
            self.room.discard(request)
            self._seen[request.id] = request
            insort(self._order, key(request))
            self._put(request)

    def step(self, requests: Sequence[Request]) -> None:
        """`file` for rows of `decode` that have been planned once more, and not yet for all their tokens."""
        self.decode.step(requests)

    def _watch(self, request: Request) -> None:
        waits = request.state is State.WAITING
        if waits is not (request.id in self.hits):
            if waits:
                self.hits.watch(request)
            else:
                self.hits.unwatch(request.id)

    def refresh_hits(self) -> None:
        """Take over what has changed in the prefix cache."""
        for request in self.hits.refresh():
            self.prefill.refresh(request)

    def unfile(self, request: Request) -> None:
        """Take a request out of where it is filed."""
        self._forget(request)
        self._take_out(request)
        self._reveal()

    def _take_out(self, request: Request) -> None:
        self.hits.unwatch(request.id)
        table = self._filed.pop(request.id, None)
        if table is not None:
            table.remove(request)

    def demote(self, id: int) -> bool:
        """Make a request best effort: it is served from what the others leave. False where it is already."""
        request = self.requests[id]
        if request.tier == BEST_EFFORT:
            return False
        filed = id in self._filed
        if filed:
            self._take_out(request)
        request.tier = BEST_EFFORT
        if filed:
            self.file(request)
        return True

    def turn(self, role: Role) -> list[Request]:
        """The instance is for something else from now on; returns those that waited to be decoded elsewhere and are
        decoded here instead."""
        self.role = role
        kept = []
        for request in self.requests.values():
            if request.state is State.FINISHED:
                continue
            decodes = request.state is State.RUNNING and request.generated > 0 and request.remaining == 1
            request.stays = role is Role.PREFILL and decodes
            if request.state is State.HANDOVER and role is not Role.PREFILL:
                request.state = State.RUNNING
                kept.append(request)
            self.file(request)
        return kept

    def check(self) -> None:
        """Raises AssertionError where a request is filed wrongly."""
        for request in self.requests.values():
            assert request.inflight >= 0 and request.pending >= 0, f"{request} counts below zero"
            hidden = request.id in self.room
            table = None if hidden else self._belongs(request)
            assert self._filed.get(request.id) is table, f"{request} is in the wrong table"
            spare = request.state is State.WAITING and request.tier == BEST_EFFORT
            assert spare is (hidden or request.id in self._seen), f"{request} is on the wrong side of the room"
        for table in (self.prefill, self.decode):
            table.check()
            assert table.standard == sum(one.tier != BEST_EFFORT for one in table), "best effort is miscounted"
        assert len(self.prefill) + len(self.decode) == len(self._filed), "tables and index disagree"
        assert self._filed.keys() <= self.requests.keys(), "a request that left is still filed"
        assert not self.room or len(self._order) == self._shown, "a request waits where no policy sees it"
        waiting = {id for id, one in self.requests.items() if one.state is State.WAITING and id not in self.room}
        assert waiting == set(self.hits), "prefix hits are watched of other requests than those that wait"
        self.hits.check()

    def _belongs(self, request: Request) -> Table | None:
        if request.state is State.WAITING:
            return self.prefill
        if request.state is not State.RUNNING or request.generated >= request.limit:
            return None
        if request.suspended or request.drafting:
            return None  # what it can compute next is not known before its step ends
        if request.pending and self.role is Role.PREFILL and not request.stays:
            return None  # its prompt is done: it leaves
        return self.decode if request.remaining == 1 and request.generated else self.prefill
