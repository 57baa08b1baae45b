"""KV transfers from prefill to decode instances, chunk by chunk while the prompt is still being computed.

Running decodes leave an instance that became a prefill instance in the same way, and decode there
until a decode instance has room. So do requests that find no room, if the router lets them decode
in place.

The destination is chosen, and its pages reserved, when one more chunk can complete the prompt.
Without room, the KV stays on the source until there is some. Pages are not reserved at the first
chunk, because prompts that a policy postpones would then hold much of the decode pool.

A transfer that is late or keeps failing ends no request: the request decodes on the source to its
end. Late is a transfer for which it has stood still too long, for whatever reason.

A prefill owns all its pages from the start (kv_manager.py), so every reservation gets filled, or is
released if the prefill loses its pages (best effort may). Hence instances cannot wait for each
other's pages in a cycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Any

from ..api.errors import StepFailed
from ..api.instance_view import ReadOnlyView
from ..api.plan import KVBuffer
from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request, State
from ..instance.kv_manager import Reservation, WriteBack
from ..instance.loop import Core
from ..instance.watchdog import PATIENT, Patience
from ..routing.base import Fleet, Router

ATTEMPTS = 3  # failed imports until a request stays on the source
KEPT = 4  # requests per call of `place` that the router is asked about


class KVWriteBack:
    """All KV write-backs of a cluster. Writer: the KVTransferManager, in the event loop of the Cluster."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], wanted: bool) -> None:
        self._spawn = spawn
        self._wanted = wanted
        self._sources: dict[int, Core] = {}
        self.pages = 0  # pages written back

    def came_from(self, id: int, source: Core) -> None:
        """Remember the instance that computed the prompt of a request."""
        if self._wanted:
            self._sources[id] = source

    def forget(self, id: int) -> None:
        self._sources.pop(id, None)

    def copy(self, core: Core, request: Request) -> None:
        """Copy the full pages of a request that just finished on `core` to where its prompt was computed."""
        source = self._sources.pop(request.id, None)
        if source is None:
            return
        pages = core.scheduler.blocks.find(request.digests)
        returned = source.scheduler.reserve_write_back(request.id, request.digests[: len(pages)])
        if returned is None:
            return
        try:
            kv_buffer = core.executor.export_kv(pages[returned.cached :])
        except StepFailed:  # a later step has raised, and the pool of `core` is lost
            source.scheduler.finish_write_back(request.id, False)
            return
        self._spawn(self._carry(request.id, source, returned, kv_buffer))

    async def _carry(self, id: int, source: Core, returned: WriteBack, kv_buffer: KVBuffer) -> None:
        try:
            await source.executor.import_kv(kv_buffer, returned.pages[returned.cached :])
        except Exception:
            arrived = False  # a later prompt computes these tokens again
        else:
            arrived = True
            self.pages += len(returned.pages) - returned.cached
        source.scheduler.finish_write_back(id, arrived)
        source.wake()


class KVTransfer:
    """The KV transfer of one request. Writer: the KVTransferManager."""

    def __init__(self, request: Request, source: Core) -> None:
        self.request = request
        self.source = source
        self.target: Core | None = None
        self.reservation: Reservation | None = None
        self.settled = 0  # tokens with KV on the source
        self.drops = 0  # drops of its KV on the source that were handled here
        self.moved = 0  # pages on the target
        self.stated = False  # whether the target has what layers with a state keep, or there is no such layer
        self.failures = 0
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.abandoned = False  # its task was cancelled because an instance hangs

    @property
    def complete(self) -> bool:
        """Whether the prompt is computed, so that only the transfer is left."""
        return self.request.state is State.TRANSFERRING

    @property
    def stays(self) -> bool:
        """Whether the request decodes on the source, because imports were late or failed."""
        return self.failures >= ATTEMPTS

    @property
    def nearly(self) -> bool:
        """Whether the prompt is computed, or its next chunk can complete it."""
        request = self.request
        chunk = self.source.scheduler.limits.tokens
        near = self.complete or (request.state is State.RUNNING and request.remaining <= chunk)
        return near and not self.stays


class KVTransferManager:
    """All KV transfers of a cluster, in order of arrival. Writer of KVTransfers, in the event loop of the Cluster.

    `spawn` starts a task; an exception in it fails the cluster. `arrived` is called when a request
    has moved, or decodes in place. `held` says whether the first token of a request is held until
    its KV has arrived.
    """

    def __init__(
        self,
        cores: Sequence[Core],
        router: Router,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        arrived: Callable[[Request], None],
        held: Callable[[int], bool],
        patience: Patience = PATIENT,
    ) -> None:
        self._cores = cores
        self._schedulers = [core.scheduler for core in cores]
        self._views = [ReadOnlyView(core.scheduler) for core in cores]
        self._router = router
        self._spawn = spawn
        self._arrived = arrived
        self._held = held
        self._patience = patience
        self._going: dict[int, KVTransfer] = {}
        self.write_back = KVWriteBack(spawn, router.writes_back)
        self.transfers = 0
        self.tokens = 0  # tokens moved
        self.seconds = 0.0  # seconds of transfers, including waiting for the link

    def __len__(self) -> int:
        return len(self._going)

    def fleet(self) -> Fleet:
        """Return the current state of all instances, for the router."""
        return Fleet(self._cores[0].executor.now(), self._views, self._predicted)

    def _predicted(self, tokens: int) -> float:
        """Predict the seconds to move the KV of this many tokens, from the transfers so far."""
        return tokens * self.seconds / self.tokens if self.tokens else 0.0

    def advance(self, source: Core, request: Request, settled: int) -> None:
        """Record that the source has computed the KV of `settled` tokens. Call `place` afterwards."""
        transfer = self._going.get(request.id)
        if transfer is None:
            transfer = self._going[request.id] = KVTransfer(request, source)
        transfer.settled, transfer.drops = settled, request.drops
        transfer.changed.set()

    def place(self) -> None:
        """Reserve room for waiting transfers by rank, ties by arrival, until one does not fit.

        Later ones may not pass it, or large requests would starve. Requests without room may decode
        in place. Also updates the `kv_waiting` of all instances.
        """
        ranked = self._ranked()
        for transfer in ranked:
            if transfer.reservation is None and transfer.nearly and not self._reserve(transfer):
                break
        self._keep([transfer for transfer in ranked if transfer.complete and transfer.reservation is None])
        lacking = sum(pending.complete and pending.reservation is None for pending in self._going.values())
        for scheduler in self._schedulers:
            scheduler.set_kv_waiting(lacking if scheduler.role is Role.DECODE else 0)

    def _ranked(self) -> list[KVTransfer]:
        fleet = self.fleet()

        def rank(transfer: KVTransfer) -> tuple[bool, float]:
            return transfer.request.tier == BEST_EFFORT, self._router.decode_priority(transfer.request, fleet)

        return sorted(self._going.values(), key=rank)

    def _keep(self, waiting: Sequence[KVTransfer]) -> None:
        """Let requests that stay decode in place, and the first without room, if the router agrees."""
        asked = islice((transfer for transfer in waiting if not transfer.stays), KEPT)
        for transfer in [*(staying for staying in waiting if staying.stays), *asked]:
            request, fleet = transfer.request, self.fleet()
            if transfer.stays or self._router.decode_in_place(request, self._cores.index(transfer.source), fleet):
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
                transfer.moved, transfer.stated = reservation.cached, False
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
        """Send the pages as they are computed, and then move the request."""
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
            elif transfer.complete and not transfer.stated:
                await self._send_state(transfer, target, reservation)
            elif transfer.complete:
                self._finish(transfer, source, target)
                return
            else:
                transfer.changed.clear()
                await transfer.changed.wait()
        self._give_up(transfer, target, reservation)

    async def _send(self, transfer: KVTransfer, target: Core, reservation: Reservation, ready: int) -> None:
        request, begun, pages = transfer.request, target.executor.now(), slice(transfer.moved, ready)
        tokens = (ready - transfer.moved) * target.executor.page_size

        async def move() -> None:
            kv_buffer = transfer.source.executor.export_kv(request.pages[pages])
            async with asyncio.timeout(self._longest(transfer, target, tokens)):
                await target.executor.import_kv(kv_buffer, reservation.pages[pages])

        if not await self._moved(transfer, move()):
            return
        self.tokens += tokens
        transfer.moved = ready
        self.transfers += 1
        self.seconds += target.executor.now() - begun

    async def _send_state(self, transfer: KVTransfer, target: Core, reservation: Reservation) -> None:
        """Send what layers with linear attention keep of the request, once all of its tokens are computed."""
        assert transfer.request.slot is not None
        origin = transfer.request.slot

        async def move() -> None:
            state = transfer.source.executor.export_state(origin)
            if state is not None:
                async with asyncio.timeout(self._longest(transfer, target, target.executor.page_size)):
                    await target.executor.import_state(state, reservation.slot)

        transfer.stated = await self._moved(transfer, move())

    def _longest(self, transfer: KVTransfer, target: Core, tokens: int) -> float:
        """Return the seconds after which a transfer of this many tokens is late."""
        begun = target.executor.now()
        busy = sum(max(0.0, core.scheduler.ends - begun) for core in (transfer.source, target))
        return busy + self._patience.of(self._predicted(tokens))

    @staticmethod
    async def _moved(transfer: KVTransfer, move: Coroutine[Any, Any, None]) -> bool:
        """Run a part of a transfer; return whether it ended well. Otherwise its task ends."""
        try:
            await move
        except TimeoutError:
            transfer.failures = ATTEMPTS  # the request has waited long enough
        except Exception as error:
            transfer.failures += not isinstance(error, StepFailed)  # a lost pool says nothing about the link
        else:
            return True
        transfer.task = None
        return False

    def _finish(self, transfer: KVTransfer, source: Core, target: Core) -> None:
        del self._going[transfer.request.id]
        self.write_back.came_from(transfer.request.id, source)
        request = source.scheduler.release(transfer.request.id)
        now = request.transferred_at = target.executor.now()  # between two owners
        target.scheduler.accept(request, now if self._held(request.id) else None)
        self._arrived(request)
        source.wake()
        target.wake()

    def _give_up(self, transfer: KVTransfer, target: Core, reservation: Reservation) -> None:
        """Release the reservation; start again from the beginning if the request still needs the transfer."""
        target.scheduler.unreserve(reservation)
        if self._going.get(transfer.request.id) is transfer:
            transfer.target = transfer.reservation = transfer.task = None
        self.place()
        target.wake()

    def drop(self, id: int) -> None:
        """Forget the transfer of a request that finished, or lost its KV on the source."""
        self.write_back.forget(id)
        transfer = self._going.pop(id, None)
        if transfer is not None:
            transfer.changed.set()

    def dropped(self, core: Core) -> None:
        """Release the reservations of requests that lost their KV on this instance.

        Otherwise the reserved pages would stay unused until the KV is recomputed. If that has to
        wait for a request that needs these pages, neither could proceed.
        """
        for transfer in self._going.values():
            if transfer.source is core and transfer.request.drops > transfer.drops:
                transfer.settled, transfer.drops, transfer.task = 0, transfer.request.drops, None
                transfer.changed.set()

    def role_changed(self, core: Core) -> None:
        """Stop transfers that the new role of an instance makes unnecessary or wrong.

        Requests stay if the instance no longer is a prefill instance, and none moves to an instance
        that became one. A send under way to it ends first, because it may still write its pages.
        """
        for transfer in list(self._going.values()):
            if transfer.source is core and core.scheduler.role is not Role.PREFILL:
                self.drop(transfer.request.id)
            elif transfer.target is core and core.scheduler.role is Role.PREFILL:
                transfer.task = None
                transfer.changed.set()

    def hung(self, core: Core) -> None:
        """Cancel the transfers from and to an instance with a hung step: they would not end either."""
        for transfer in self._going.values():
            if core in (transfer.source, transfer.target) and transfer.task is not None:
                transfer.abandoned = True
                transfer.task.cancel()

    def lost(self, core: Core) -> None:
        """Forget the transfers from an instance after the loss of its KV pool, and restart those to it."""
        for transfer in list(self._going.values()):
            if transfer.source is core:
                self.drop(transfer.request.id)
            elif transfer.target is core:
                transfer.changed.set()
        self.place()
