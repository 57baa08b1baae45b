"""KV on its way from a prefill instance to a decode instance, chunk by chunk while the prompt is still computed.

Rows that decode on an instance whose role has become prefill take the same way, and decode where they are until
there is room for them; so do those that found none, where the placement keeps them.

The destination is chosen, and its pages reserved, when one more chunk can end the prompt, if there is room;
otherwise the KV stays held where it is and moves when space comes. Reserving at the first chunk let prompts that a
policy postpones hoard the decode side: half of it at 4.6 requests/s of K128 under `kairos`. A prefill owns all its
pages from the start (memory.py), so whatever is reserved will be filled; where it loses them (best effort may) the
reservation is given back. So no cycle of instances waiting for each other's pages can close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any

from ..api.errors import StepFailed
from ..api.plan import UNAVAILABLE, KvParcel
from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request, State
from ..instance.kv_manager import Reservation, Returned
from ..instance.loop import Core
from ..instance.watchdog import PATIENT, Patience
from ..routing import Fleet, Placement

ATTEMPTS = 3
KEPT = 4  # requests that a placement is asked about at a time


class Returns:
    """All KV on its way back in a cluster. Writer: the Mover, in the Cluster's event loop."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], wanted: bool) -> None:
        self._spawn = spawn
        self._wanted = wanted
        self._sources: dict[int, Core] = {}
        self.pages = 0  # that came back

    def came_from(self, id: int, source: Core) -> None:
        if self._wanted:
            self._sources[id] = source

    def forget(self, id: int) -> None:
        self._sources.pop(id, None)

    def give_back(self, core: Core, request: Request) -> None:
        """A request has finished on `core`: its full pages are still findable there."""
        source = self._sources.pop(request.id, None)
        if source is None:
            return
        pages = core.scheduler.blocks.find(request.digests)
        returned = source.scheduler.receive(request.id, request.digests[: len(pages)])
        if returned is None:
            return
        try:
            parcel = core.executor.export_kv(pages[returned.cached :])
        except StepFailed:  # the step behind the request's last one has raised, and its pool is gone
            source.scheduler.keep(request.id, False)
            return
        self._spawn(self._carry(request.id, source, returned, parcel))

    async def _carry(self, id: int, source: Core, returned: Returned, parcel: KvParcel) -> None:
        try:
            await source.executor.import_kv(parcel, returned.pages[returned.cached :])
        except Exception:
            arrived = False  # it is computed again when it is wanted
        else:
            arrived = True
            self.pages += len(returned.pages) - returned.cached
        source.scheduler.keep(id, arrived)
        source.wake()


class Handover:
    """One request's way. Writer: the Mover."""

    def __init__(self, request: Request, source: Core) -> None:
        self.request = request
        self.source = source
        self.target: Core | None = None
        self.reservation: Reservation | None = None
        self.settled = 0  # tokens whose KV stands at the source
        self.drops = 0  # of its KV there, that are known here
        self.moved = 0  # pages that stand at the target
        self.failures = 0
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.abandoned = False  # its task is cancelled: what it waits for hangs

    @property
    def complete(self) -> bool:
        """The prompt is done; only the move is left."""
        return self.request.state is State.HANDOVER

    @property
    def nearly(self) -> bool:
        """The next chunk can end the prompt, or has."""
        request = self.request
        chunk = self.source.scheduler.limits.tokens
        return self.complete or (request.state is State.RUNNING and request.remaining <= chunk)


class Mover:
    """All hand-overs of a cluster, in order of arrival. Writer of Handovers; in the Cluster's event loop.

    `spawn` starts a task whose failure is the cluster's; `arrived` hears of requests that have moved, `failed` of
    those whose KV cannot be. Of those that are `held` the first token counts when their KV has arrived.
    """

    def __init__(
        self,
        cores: Sequence[Core],
        placement: Placement,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        arrived: Callable[[Request], None],
        failed: Callable[[Request, str, str], None],
        held: Callable[[int], bool],
        patience: Patience = PATIENT,
    ) -> None:
        self._cores = cores
        self._schedulers = [core.scheduler for core in cores]
        self._placement = placement
        self._spawn = spawn
        self._arrived = arrived
        self._failed = failed
        self._held = held
        self._patience = patience
        self._going: dict[int, Handover] = {}
        self.returns = Returns(spawn, placement.gives_back)
        self.transfers = 0
        self.tokens = 0  # moved
        self.seconds = 0.0  # spent in transfers, their waiting for the link included

    def __len__(self) -> int:
        return len(self._going)

    def fleet(self) -> Fleet:
        """The instances as they stand now, for a placement to look at."""
        return Fleet(self._cores[0].executor.now(), self._schedulers, self._predicted)

    def _predicted(self, tokens: int) -> float:
        """Seconds that moving the KV of so many tokens takes, by those moved so far."""
        return tokens * self.seconds / self.tokens if self.tokens else 0.0

    def advance(self, source: Core, request: Request, settled: int) -> None:
        """More of a request's KV stands at the source; `place` comes next."""
        handover = self._going.get(request.id)
        if handover is None:
            handover = self._going[request.id] = Handover(request, source)
        handover.settled, handover.drops = settled, request.drops
        handover.changed.set()

    def place(self) -> None:
        """Reserve room for those that wait, first come first, by rank; none passes another of its kind."""
        ranked = self._ranked()
        for handover in ranked:
            if handover.reservation is None and handover.nearly and not self._reserve(handover):
                break
        self._keep(one for one in ranked if one.complete and one.reservation is None)
        lacking = sum(one.complete and one.reservation is None for one in self._going.values())
        for scheduler in self._schedulers:
            scheduler.kv_waiting = lacking if scheduler.role is Role.DECODE else 0

    def _ranked(self) -> list[Handover]:
        fleet = self.fleet()

        def rank(one: Handover) -> tuple[bool, float]:
            return one.request.tier == BEST_EFFORT, self._placement.precedence(one.request, fleet)

        return sorted(self._going.values(), key=rank)

    def _keep(self, waiting: Iterable[Handover]) -> None:
        """Let the first of those that no instance has room for decode where they are, where the placement says so."""
        for handover in islice(waiting, KEPT):
            request, fleet = handover.request, self.fleet()
            if self._placement.keeps(request, self._cores.index(handover.source), fleet):
                handover.source.scheduler.stay(request.id, fleet.now if self._held(request.id) else None)
                self._arrived(request)
                handover.source.wake()

    def _reserve(self, handover: Handover) -> bool:
        fleet = self.fleet()
        for index in self._placement.decode(handover.request, fleet) if fleet.decoders else ():
            reservation = self._schedulers[index].reserve(handover.request)
            if reservation is not None:
                handover.target = self._cores[index]
                handover.reservation = reservation
                handover.moved = reservation.cached
                handover.task = self._spawn(self._carry(handover))
                if handover.request.stays:
                    handover.source.scheduler.leave(handover.request.id)
                return True
        return False

    async def _carry(self, handover: Handover) -> None:
        target, reservation = handover.target, handover.reservation
        try:
            await self._carried(handover)
        except asyncio.CancelledError:
            if handover.abandoned and target is not None and reservation is not None:
                handover.abandoned = False
                self._give_up(handover, target, reservation)
            raise

    async def _carried(self, handover: Handover) -> None:
        """Send pages as they are finished, then let the request follow."""
        request, source, target, reservation = handover.request, handover.source, handover.target, handover.reservation
        assert target is not None and reservation is not None
        size = target.executor.page_size
        while (
            self._going.get(request.id) is handover
            and handover.task is asyncio.current_task()
            and target.scheduler.reserved(reservation)
        ):
            ready = len(reservation.pages) if handover.complete else handover.settled // size
            if ready > handover.moved:
                await self._send(handover, target, reservation, ready)
            elif handover.complete:
                self._finish(handover, source, target)
                return
            else:
                handover.changed.clear()
                await handover.changed.wait()
        self._give_up(handover, target, reservation)

    async def _send(self, handover: Handover, target: Core, reservation: Reservation, ready: int) -> None:
        request, begun = handover.request, target.executor.now()
        busy = sum(max(0.0, core.scheduler.ends - begun) for core in (handover.source, target))
        most = busy + self._patience.of(self._predicted((ready - handover.moved) * target.executor.page_size))
        try:
            parcel = handover.source.executor.export_kv(request.pages[handover.moved : ready])
            async with asyncio.timeout(most):
                await target.executor.import_kv(parcel, reservation.pages[handover.moved : ready])
        except TimeoutError:
            handover.task = None
            if self._going.get(request.id) is handover:
                way = f"from instance {handover.source.name} to {target.name}"
                self._failed(request, UNAVAILABLE, f"moving its KV {way} did not end within {most:.3g} s")
            return
        except Exception as error:
            handover.failures += not isinstance(error, StepFailed)  # which tells of a pool that is gone, not of the way
            handover.task = None
            if handover.failures >= ATTEMPTS and self._going.get(request.id) is handover:
                self._failed(request, "error", f"moving its KV failed {ATTEMPTS} times: {error}")
            return
        self.tokens += (ready - handover.moved) * target.executor.page_size
        handover.moved = ready
        self.transfers += 1
        self.seconds += target.executor.now() - begun

    def _finish(self, handover: Handover, source: Core, target: Core) -> None:
        del self._going[handover.request.id]
        self.returns.came_from(handover.request.id, source)
        request = source.scheduler.disown(handover.request.id)
        target.scheduler.adopt(request, target.executor.now() if self._held(request.id) else None)
        self._arrived(request)
        source.wake()
        target.wake()

    def _give_up(self, handover: Handover, target: Core, reservation: Reservation) -> None:
        """The request ended, a pool was rebuilt, or the transfer failed: try again from the start if it still is."""
        target.scheduler.unreserve(reservation)
        if self._going.get(handover.request.id) is handover:
            handover.target = handover.reservation = handover.task = None
        self.place()
        target.wake()

    def drop(self, id: int) -> None:
        """The request is over, or its KV at the source is gone."""
        self.returns.forget(id)
        handover = self._going.pop(id, None)
        if handover is not None:
            handover.changed.set()

    def dropped(self, core: Core) -> None:
        """An instance has taken somebody's KV. Pages reserved for it elsewhere would wait for it to be computed again,
        and those whose room it is computed in may wait for just these pages."""
        for handover in self._going.values():
            if handover.source is core and handover.request.drops > handover.drops:
                handover.settled, handover.drops, handover.task = 0, handover.request.drops, None
                handover.changed.set()

    def turned(self, core: Core) -> None:
        """An instance is for something else: its requests stay where it prefills no more, and nobody comes to it to
        decode where it does. What is under way to it ends first: its pages may be written until then."""
        for handover in list(self._going.values()):
            if handover.source is core and core.scheduler.role is not Role.PREFILL:
                self.drop(handover.request.id)
            elif handover.target is core and core.scheduler.role is Role.PREFILL:
                handover.task = None
                handover.changed.set()

    def hung(self, core: Core) -> None:
        """A step of an instance does not end: nor do transfers from it, or to it."""
        for handover in self._going.values():
            if core in (handover.source, handover.target) and handover.task is not None:
                handover.abandoned = True
                handover.task.cancel()

    def lost(self, core: Core) -> None:
        """An instance's pool is new: what it held, or was to receive, is gone."""
        for handover in list(self._going.values()):
            if handover.source is core:
                self.drop(handover.request.id)
            elif handover.target is core:
                handover.changed.set()
        self.place()
