"""KV on its way from a prefill instance to a decode instance, chunk by chunk while the prompt is still computed.

Rows that decode on an instance whose role has become prefill take the same way, and decode where they are until
there is room for them; so do those that found none, where the router keeps them.

The destination is chosen, and its pages reserved, when one more chunk can end the prompt, if there is room;
otherwise the KV stays held where it is and moves when space comes. Reserving at the first chunk let prompts that a
policy postpones hoard the decode side: half of it at 4.6 requests/s of K128 under `kairos`. A prefill owns all its
pages from the start (kv_manager.py), so whatever is reserved will be filled; where it loses them (best effort may) the
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
from ..instance.kv_manager import Reservation, WriteBack
from ..instance.live_view import LiveView
from ..instance.loop import Core
from ..instance.watchdog import PATIENT, Patience
from ..routing.base import Fleet, Router

ATTEMPTS = 3
KEPT = 4  # requests that a router is asked about at a time


class KVWriteBack:
    """All KV on its way back in a cluster. Writer: the KVTransferManager, in the Cluster's event loop."""

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

    def copy(self, core: Core, request: Request) -> None:
        """A request has finished on `core`: its full pages are still findable there."""
        source = self._sources.pop(request.id, None)
        if source is None:
            return
        pages = core.scheduler.blocks.find(request.digests)
        returned = source.scheduler.reserve_write_back(request.id, request.digests[: len(pages)])
        if returned is None:
            return
        try:
            parcel = core.executor.export_kv(pages[returned.cached :])
        except StepFailed:  # the step behind the request's last one has raised, and its pool is gone
            source.scheduler.finish_write_back(request.id, False)
            return
        self._spawn(self._carry(request.id, source, returned, parcel))

    async def _carry(self, id: int, source: Core, returned: WriteBack, parcel: KvParcel) -> None:
        try:
            await source.executor.import_kv(parcel, returned.pages[returned.cached :])
        except Exception:
            arrived = False  # it is computed again when it is wanted
        else:
            arrived = True
            self.pages += len(returned.pages) - returned.cached
        source.scheduler.finish_write_back(id, arrived)
        source.wake()


class KVTransfer:
    """One request's way. Writer: the KVTransferManager."""

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
        return self.request.state is State.TRANSFERRING

    @property
    def nearly(self) -> bool:
        """The next chunk can end the prompt, or has."""
        request = self.request
        chunk = self.source.scheduler.limits.tokens
        return self.complete or (request.state is State.RUNNING and request.remaining <= chunk)


class KVTransferManager:
    """All hand-overs of a cluster, in order of arrival. Writer of KVTransfers; in the Cluster's event loop.

    `spawn` starts a task whose failure is the cluster's; `arrived` hears of requests that have moved, `failed` of
    those whose KV cannot be. Of those that are `held` the first token counts when their KV has arrived.
    """

    def __init__(
        self,
        cores: Sequence[Core],
        router: Router,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        arrived: Callable[[Request], None],
        failed: Callable[[Request, str, str], None],
        held: Callable[[int], bool],
        patience: Patience = PATIENT,
    ) -> None:
        self._cores = cores
        self._schedulers = [core.scheduler for core in cores]
        self._views = [LiveView(core.scheduler) for core in cores]
        self._router = router
        self._spawn = spawn
        self._arrived = arrived
        self._failed = failed
        self._held = held
        self._patience = patience
        self._going: dict[int, KVTransfer] = {}
        self.write_back = KVWriteBack(spawn, router.writes_back)
        self.transfers = 0
        self.tokens = 0  # moved
        self.seconds = 0.0  # spent in transfers, their waiting for the link included

    def __len__(self) -> int:
        return len(self._going)

    def fleet(self) -> Fleet:
        """The instances as they stand now, for a router to look at."""
        return Fleet(self._cores[0].executor.now(), self._views, self._predicted)

    def _predicted(self, tokens: int) -> float:
        """Seconds that moving the KV of so many tokens takes, by those moved so far."""
        return tokens * self.seconds / self.tokens if self.tokens else 0.0

    def advance(self, source: Core, request: Request, settled: int) -> None:
        """More of a request's KV stands at the source; `place` comes next."""
        transfer = self._going.get(request.id)
        if transfer is None:
            transfer = self._going[request.id] = KVTransfer(request, source)
        transfer.settled, transfer.drops = settled, request.drops
        transfer.changed.set()

    def place(self) -> None:
        """Reserve room for those that wait, first come first, by rank; none passes another of its kind."""
        ranked = self._ranked()
        for transfer in ranked:
            if transfer.reservation is None and transfer.nearly and not self._reserve(transfer):
                break
        self._keep(one for one in ranked if one.complete and one.reservation is None)
        lacking = sum(one.complete and one.reservation is None for one in self._going.values())
        for scheduler in self._schedulers:
            scheduler.set_kv_waiting(lacking if scheduler.role is Role.DECODE else 0)

    def _ranked(self) -> list[KVTransfer]:
        fleet = self.fleet()

        def rank(one: KVTransfer) -> tuple[bool, float]:
            return one.request.tier == BEST_EFFORT, self._router.decode_priority(one.request, fleet)

        return sorted(self._going.values(), key=rank)

    def _keep(self, waiting: Iterable[KVTransfer]) -> None:
        """Let the first of those that no instance has room for decode where they are, where the router says so."""
        for transfer in islice(waiting, KEPT):
            request, fleet = transfer.request, self.fleet()
            if self._router.decode_in_place(request, self._cores.index(transfer.source), fleet):
                transfer.source.scheduler.decode_in_place(request.id, fleet.now if self._held(request.id) else None)
                self._arrived(request)
                transfer.source.wake()

    def _reserve(self, transfer: KVTransfer) -> bool:
        fleet = self.fleet()
        for index in self._router.decode(transfer.request, fleet) if fleet.decoders else ():
            reservation = self._schedulers[index].reserve(transfer.request)
            if reservation is not None:
                transfer.target = self._cores[index]
                transfer.reservation = reservation
                transfer.moved = reservation.cached
                transfer.task = self._spawn(self._carry(transfer))
                if transfer.request.decodes_in_place:
                    transfer.source.scheduler.leave(transfer.request.id)
                return True
        return False

    async def _carry(self, transfer: KVTransfer) -> None:
        target, reservation = transfer.target, transfer.reservation
        try:
            await self._carried(transfer)
        except asyncio.CancelledError:
            if transfer.abandoned and target is not None and reservation is not None:
                transfer.abandoned = False
                self._give_up(transfer, target, reservation)
            raise

    async def _carried(self, transfer: KVTransfer) -> None:
        """Send pages as they are finished, then let the request follow."""
        request, source, target, reservation = transfer.request, transfer.source, transfer.target, transfer.reservation
        assert target is not None and reservation is not None
        size = target.executor.page_size
        while (
            self._going.get(request.id) is transfer
            and transfer.task is asyncio.current_task()
            and target.scheduler.reserved(reservation)
        ):
            ready = len(reservation.pages) if transfer.complete else transfer.settled // size
            if ready > transfer.moved:
                await self._send(transfer, target, reservation, ready)
            elif transfer.complete:
                self._finish(transfer, source, target)
                return
            else:
                transfer.changed.clear()
                await transfer.changed.wait()
        self._give_up(transfer, target, reservation)

    async def _send(self, transfer: KVTransfer, target: Core, reservation: Reservation, ready: int) -> None:
        request, begun = transfer.request, target.executor.now()
        busy = sum(max(0.0, core.scheduler.ends - begun) for core in (transfer.source, target))
        most = busy + self._patience.of(self._predicted((ready - transfer.moved) * target.executor.page_size))
        try:
            parcel = transfer.source.executor.export_kv(request.pages[transfer.moved : ready])
            async with asyncio.timeout(most):
                await target.executor.import_kv(parcel, reservation.pages[transfer.moved : ready])
        except TimeoutError:
            transfer.task = None
            if self._going.get(request.id) is transfer:
                way = f"from instance {transfer.source.name} to {target.name}"
                self._failed(request, UNAVAILABLE, f"moving its KV {way} did not end within {most:.3g} s")
            return
        except Exception as error:
            transfer.failures += not isinstance(error, StepFailed)  # which tells of a pool that is gone, not of the way
            transfer.task = None
            if transfer.failures >= ATTEMPTS and self._going.get(request.id) is transfer:
                self._failed(request, "error", f"moving its KV failed {ATTEMPTS} times: {error}")
            return
        self.tokens += (ready - transfer.moved) * target.executor.page_size
        transfer.moved = ready
        self.transfers += 1
        self.seconds += target.executor.now() - begun

    def _finish(self, transfer: KVTransfer, source: Core, target: Core) -> None:
        del self._going[transfer.request.id]
        self.write_back.came_from(transfer.request.id, source)
        request = source.scheduler.release(transfer.request.id)
        target.scheduler.accept(request, target.executor.now() if self._held(request.id) else None)
        self._arrived(request)
        source.wake()
        target.wake()

    def _give_up(self, transfer: KVTransfer, target: Core, reservation: Reservation) -> None:
        """The request ended, a pool was rebuilt, or the transfer failed: try again from the start if it still is."""
        target.scheduler.unreserve(reservation)
        if self._going.get(transfer.request.id) is transfer:
            transfer.target = transfer.reservation = transfer.task = None
        self.place()
        target.wake()

    def drop(self, id: int) -> None:
        """The request is over, or its KV at the source is gone."""
        self.write_back.forget(id)
        transfer = self._going.pop(id, None)
        if transfer is not None:
            transfer.changed.set()

    def dropped(self, core: Core) -> None:
        """An instance has taken somebody's KV. Pages reserved for it elsewhere would wait for it to be computed again,
        and those whose room it is computed in may wait for just these pages."""
        for transfer in self._going.values():
            if transfer.source is core and transfer.request.drops > transfer.drops:
                transfer.settled, transfer.drops, transfer.task = 0, transfer.request.drops, None
                transfer.changed.set()

    def role_changed(self, core: Core) -> None:
        """An instance is for something else: its requests stay where it prefills no more, and nobody comes to it to
        decode where it does. What is under way to it ends first: its pages may be written until then."""
        for transfer in list(self._going.values()):
            if transfer.source is core and core.scheduler.role is not Role.PREFILL:
                self.drop(transfer.request.id)
            elif transfer.target is core and core.scheduler.role is Role.PREFILL:
                transfer.task = None
                transfer.changed.set()

    def hung(self, core: Core) -> None:
        """A step of an instance does not end: nor do transfers from it, or to it."""
        for transfer in self._going.values():
            if core in (transfer.source, transfer.target) and transfer.task is not None:
                transfer.abandoned = True
                transfer.task.cancel()

    def lost(self, core: Core) -> None:
        """An instance's pool is new: what it held, or was to receive, is gone."""
        for transfer in list(self._going.values()):
            if transfer.source is core:
                self.drop(transfer.request.id)
            elif transfer.target is core:
                transfer.changed.set()
        self.place()
