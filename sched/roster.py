"""Which requests an instance has, and which of them a policy may choose from."""

from __future__ import annotations

from collections.abc import Sequence

from .policy import Role
from .prefix_hits import PrefixHits
from .request import BEST_EFFORT, Request, State
from .table import Table


class Roster:
    """The requests of one instance, filed in two tables by what they need next. Writer: the Scheduler.

    `prefill` has those with prompt work (or dropped KV to compute again), `decode` those with one token left.
    A request that must wait for a result, or for another instance, is in neither. `hits` watches those that wait.
    """

    def __init__(self, role: Role, hits: PrefixHits) -> None:
        self.role = role
        self.hits = hits
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

    def file(self, request: Request) -> None:
        """Put a request into the table it belongs to now, or take over what has changed."""
        table, before = self._belongs(request), self._filed.get(request.id)
        if table is not before:
            self.unfile(request)
        self._watch(request)
        if table is before and table is not None:
            table.refresh(request)
        elif table is not None:
            table.add(request)
            self._filed[request.id] = table

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
        self.hits.unwatch(request.id)
        table = self._filed.pop(request.id, None)
        if table is not None:
            table.remove(request)

    def demote(self, id: int) -> bool:
        """Make a request best effort: it is served from what the others leave. False where it is already."""
        request = self.requests[id]
        if request.tier == BEST_EFFORT:
            return False
        table = self._filed.get(id)
        if table is not None:
            table.remove(request)
        request.tier = BEST_EFFORT
        if table is not None:
            table.add(request)
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
            assert self._filed.get(request.id) is self._belongs(request), f"{request} is in the wrong table"
        for table in (self.prefill, self.decode):
            assert table.standard == sum(one.tier != BEST_EFFORT for one in table), "best effort is miscounted"
        assert len(self.prefill) + len(self.decode) == len(self._filed), "tables and index disagree"
        assert self._filed.keys() <= self.requests.keys(), "a request that left is still filed"
        waiting = {id for id, request in self.requests.items() if request.state is State.WAITING}
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
