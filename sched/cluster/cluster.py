"""The instances of one process: routing, KV transfers between them, and delivery of outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..admission.base import Admission
from ..admission.none import AdmitAll
from ..api.errors import InvalidValue, Unavailable
from ..api.executor import Executor
from ..api.kv_source import KVSource, KVStore
from ..api.plan import UNAVAILABLE, Delta
from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request, State
from ..instance.loop import Core
from ..instance.scheduler import Scheduler
from ..instance.step_settler import Settled
from ..instance.watchdog import PATIENT, Patience
from ..metrics import FINISHED
from ..routing.base import Router
from .copy_out import CopyOut
from .first_tokens import Waits, waits
from .kv_transfer import KVTransferManager
from .prefix_fetch import PrefixFetch
from .queue_timeout import QueueTimeout
from .ttft_predictions import TTFTPredictions

FAILED_STEPS = 3  # in a row and within a minute: the cluster then reports that it is unhealthy

OnOutput = Callable[[Delta], None]

SETTLES = 5.0  # seconds for the steps and moves of finished requests to release their pages


class Instance(NamedTuple):
    """A scheduler and the devices it plans for."""

    name: str
    scheduler: Scheduler
    executor: Executor


class Resident(NamedTuple):
    """An unfinished request and the receiver of its outputs."""

    request: Request
    on_output: OnOutput


class Cluster:
    """The owner of all instances and their loops. Everything here runs in one event loop, real or virtual.

    `first_token`: "prefill" delivers the first token at once; "decode" holds it until the KV has
    arrived. `finished` is called for every request that ends, for any reason, while
    `ttft_predictions` still has its prediction.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        router: Router,
        admission: Admission | None = None,
        *,
        first_token: str = "prefill",
        finished: Callable[[Request], None] = lambda request: None,
        patience: Patience = PATIENT,
        sources: Sequence[KVSource] = (),
        store: KVStore | None = None,
        queue_timeout: float = 0.0,
    ) -> None:
        """Set up the instances.

        `queue_timeout`: seconds in which a request that gets no first token, and is in no step then, is ended;
        0: no limit. `sources`: where to fetch KV pages that an instance lacks. `store`: gets copies of the pages of
        requests that end.
        """
        if first_token not in ("prefill", "decode"):
            raise InvalidValue(f"{first_token=} must be 'prefill' or 'decode'", "first_token")
        self.cores = [
            Core(instance.name, instance.scheduler, instance.executor, self, patience) for instance in instances
        ]
        check_roles([core.scheduler.role for core in self.cores])
        self._router = router
        self._admission = admission or AdmitAll()
        self._schedulers = [core.scheduler for core in self.cores]
        self._pool_tokens = min(scheduler.limits.pages * scheduler.limits.page_size for scheduler in self._schedulers)
        self._hold_first = first_token == "decode"
        self._finished = finished
        self._residents: dict[int, Resident] = {}
        self.queue_timeout = QueueTimeout(queue_timeout, self.cores[0].executor.now, self._late)
        self.hung_steps = 0
        self._held: dict[int, list[Delta]] = {}  # outputs held until the KV has arrived
        self._tasks: asyncio.TaskGroup | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.kv_transfers = KVTransferManager(
            self.cores, router, self._spawn, self._arrived, self._held.__contains__, patience
        )
        self._store = store
        self.copy_out = CopyOut(store, self.cores, self._spawn)
        self.prefix_fetch = PrefixFetch(sources, self._spawn, self._fetched)
        self._covered: tuple[Role, ...] = ()  # roles before the other instances took over for a hung one
        self.clear_totals()

    def clear_totals(self) -> None:
        """Begin to count anew, as after requests that an engine serves itself before others come."""
        self.ttft_predictions = TTFTPredictions()
        self.deflections = 0  # prompts placed on or moved to a decode instance
        self.reroutes = 0  # waiting prompts moved to another instance
        self.role_changes = 0
        self.kv_transfers.transfers, self.kv_transfers.seconds = 0, 0.0

    def __len__(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._residents)

    async def run(self) -> None:
        """Run until cancelled. Only an internal error ends it; an error of one request never does."""
        async with asyncio.TaskGroup() as self._tasks:
            for core in self.cores:
                self._spawn(core.run())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(coroutine)

    async def drained(self) -> None:
        """Wait until no request is left."""
        await self._empty.wait()

    def end_session(self, session: str) -> bool:
        """Release the pages that a session keeps between turns; return whether it kept any."""
        return sum(scheduler.end_session(session) for scheduler in self._schedulers) > 0

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix caches and the store. Returns False, and clears nothing, if a request is unfinished."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLES):
                while not len(self) and any(scheduler.blocks.held for scheduler in self._schedulers):
                    await asyncio.sleep(0.001)
        if len(self) or any(scheduler.blocks.held for scheduler in self._schedulers):
            return False
        for scheduler in self._schedulers:
            scheduler.reset_prefix_cache()
        if self._store is not None:
            self._store.clear()
        return True

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Place a new request, subject to admission. `on_output` gets its outputs.

        Raises InvalidValue if it can never fit, and Unavailable if every instance that prefills has
        a hung step.
        """
        most = self._pool_tokens
        if request.prompt_length >= most:
            raise InvalidValue(
                f"a prompt of {request.prompt_length} tokens does not fit: the KV pool of an instance holds {most} "
                "tokens; raise --kv-cache-memory or --gpu-memory-utilization",
                "prompt",
            )
        request.limit = min(request.limit, most - request.prompt_length)
        fleet = self.kv_transfers.fleet()
        if not fleet.entries:
            raise Unavailable(self.ailment or "no instance prefills new prompts")
        index = self._router.prefill(request, fleet)[0]
        core = self.cores[index]
        admission = self._admission
        if request.tier != BEST_EFFORT and not admission.admits(request, fleet.instances[index], fleet.now):
            if admission.refuse:
                self._refuse(request, on_output)
                return
            request.tier = BEST_EFFORT
            core.scheduler.count_demotion()
        held = self.prefix_fetch.hold(request, core)
        if not held:
            self._add(request, core, self._router.predicted_first_token(request))
        self._residents[request.id] = Resident(request, on_output)
        self.queue_timeout.entered(request.id)
        self._empty.clear()
        if not held:
            core.wake()
            self._redirect()

    def _add(self, request: Request, core: Core, at: float | None) -> None:
        """Give a request to a scheduler. `at`: the router's prediction of its first token, if there is one."""
        core.scheduler.add(request, self._predict_ttft(request, core, at))
        self.deflections += core.scheduler.role is Role.DECODE

    def _fetched(self, request: Request, core: Core, belongs: bool) -> None:
        """Schedule a request whose prefix fetch has ended, elsewhere if its instance takes no prompts any more."""
        if not belongs:
            fleet = self.kv_transfers.fleet()
            if not fleet.entries:
                self._end(request, UNAVAILABLE, self.ailment or "no instance prefills new prompts")
                return
            core = self.cores[self._router.prefill(request, fleet)[0]]
        self._add(request, core, None)
        core.wake()
        self._redirect()

    def _end(self, request: Request, reason: str, error: str | None) -> None:
        """End a request that no scheduler has."""
        request.state, request.finish_reason, request.error = State.FINISHED, reason, error
        self._output(Delta(request.id, finish_reason=reason, error=error))

    def _predict_ttft(self, request: Request, core: Core, at: float | None) -> float | None:
        """Record the predicted time of the first token, for comparison with the actual one.

        `at` is the router's own prediction, if it made one. A request with tokens has its first already.
        Returns the predicted seconds from arrival, of an earlier placement where this one has no prediction.
        """
        if request.output:
            return self.ttft_predictions.predicted(request)
        fleet, role = self.kv_transfers.fleet(), core.scheduler.role
        later = fleet.transfer(request.prompt_length) if self._hold_first and role is not Role.DECODE else 0.0
        prediction = waits(request, core.scheduler, fleet.now) if at is None else Waits(own=at - fleet.now)
        self.ttft_predictions.note(request, role, fleet.now, prediction, later)
        return self.ttft_predictions.predicted(request)

    def _refuse(self, request: Request, on_output: OnOutput) -> None:
        request.state, request.finish_reason = State.FINISHED, "refused"
        request.error = "its latency objectives cannot be kept under the present load; try again later"
        self._finished(request)
        on_output(Delta(request.id, finish_reason=request.finish_reason, error=request.error))

    def _redirect(self) -> None:
        """Apply role changes and moves decided by the router."""
        if any(scheduler.hung for scheduler in self._schedulers):
            return  # `_cover` sets the roles while an instance hangs
        roles = self._router.roles(self.kv_transfers.fleet())
        if roles:
            self.set_roles(roles)
        for id, source, target, ends in self._router.redirect(self.kv_transfers.fleet()):
            self._move(id, self.cores[source], self.cores[target], ends)

    def _move(self, id: int, source: Core, target: Core, ends: float | None = None) -> None:
        request = source.scheduler.release(id)
        request.wait_anew()
        target.scheduler.add(request, self._predict_ttft(request, target, ends))
        self.deflections += target.scheduler.role is Role.DECODE is not source.scheduler.role
        self.reroutes += 1
        source.wake()  # the next waiting request may fit now
        target.wake()

    def set_roles(self, roles: Mapping[int, Role]) -> None:
        """Change the roles of instances, by index. No request loses a token or its KV.

        Waiting prompts move to instances that prefill, prompts in progress finish where they are,
        and running decodes move when there is room elsewhere. Raises InvalidValue, and changes
        nothing, if the new roles could not prefill or decode.
        """
        self._covered = ()
        unknown = sorted(index for index in roles if index not in range(len(self.cores)))
        if unknown:
            raise InvalidValue(f"instance={unknown[0]!r} must be 0 to {len(self.cores) - 1}", "instance")
        check_roles([roles.get(index, scheduler.role) for index, scheduler in enumerate(self._schedulers)])
        turned = [index for index, role in roles.items() if role is not self._schedulers[index].role]
        now = self.kv_transfers.fleet().now if self._hold_first else None
        self.role_changes += len(turned)
        for index in turned:
            self._schedulers[index].set_role(roles[index], now)
        for core in map(self.cores.__getitem__, turned):
            self.kv_transfers.role_changed(core)
            if core.scheduler.role is not Role.PREFILL:
                for request in core.scheduler:
                    self._arrived(request)
            if core.scheduler.role is Role.DECODE:
                self._place_again(core)
        self.kv_transfers.place()
        for core in self.cores:
            core.wake()

    def _place_again(self, core: Core) -> None:
        """Move waiting prompts without computed tokens away from an instance that became a decode instance."""
        waiting = [prompt for prompt in core.scheduler if prompt.state is State.WAITING]
        for request in waiting:
            if request.drops or request.generated:
                continue  # it resumes on the instance that dropped its KV
            better = self.cores[self._router.prefill(request, self.kv_transfers.fleet())[0]]
            if better is not core:
                self._move(request.id, core, better)

    def cancel(self, id: int, reason: str = "abort", error: str | None = None) -> None:
        """End a request early. Does nothing if it has finished."""
        for core in self.cores:
            delta = core.scheduler.cancel(id, reason, error)
            if delta is not None:
                self._output(delta)
                core.wake()
                self.kv_transfers.place()
        request = self.prefix_fetch.cancel(id)
        if request is not None:
            self._end(request, reason, error)

    def _late(self, id: int) -> bool:
        """End a request that has waited too long, unless it is in a step; return whether it is."""
        resident = self._residents.get(id)
        if resident is None or resident.request.output:
            return False
        if resident.request.inflight and not resident.request.suspended:
            return True
        why = f"no first token within {self.queue_timeout.seconds:g} s (--queue-timeout): try again later"
        self.cancel(id, "expired", why)
        return False

    def settled(self, core: Core, settled: Settled) -> None:
        """Deliver the outputs of a finished step, and continue the transfers of its requests."""
        for delta in settled.deltas:
            if self._holds(core, delta):
                self._held.setdefault(delta.request, []).append(delta)
            else:
                if delta.finish_reason in FINISHED:
                    self.kv_transfers.write_back.copy(core, self._residents[delta.request].request)
                self._output(delta)
        for request, tokens in settled.advanced:
            self.kv_transfers.advance(core, request, tokens)
        if len(self.kv_transfers):
            self.kv_transfers.place()
        self._redirect()

    def _holds(self, core: Core, delta: Delta) -> bool:
        """Return whether to hold an output until the KV has arrived: the first token and what precedes it."""
        if not self._hold_first or core.scheduler.role is not Role.PREFILL or delta.finish_reason is not None:
            return False
        return delta.request in self._held or len(self._residents[delta.request].request.output) <= 1

    def dropped(self, core: Core) -> None:
        """Update the transfers of requests that lost their KV on this instance."""
        self.kv_transfers.dropped(core)

    def recovered(self, core: Core, deltas: list[Delta]) -> None:
        """Deliver the outputs of a recovery, and reset the transfers from and to the lost pool."""
        for delta in deltas:
            self._output(delta)
        self.kv_transfers.lost(core)

    def _arrived(self, request: Request) -> None:
        for delta in self._held.pop(request.id, ()):
            self._output(delta)

    # Instances with a hung step.

    def hung(self, core: Core, seconds: float) -> None:
        """Count a hung step, and start to isolate its instance."""
        self.hung_steps += 1
        self._spawn(self._cut_off(core, f"a step of instance {core.name} has not ended after {seconds:.0f} s"))

    async def _cut_off(self, core: Core, why: str) -> None:
        """Isolate an instance with a hung step.

        Requests in the step fail. The others move to other instances with their tokens, and
        recompute the KV they held.
        """
        self.kv_transfers.hung(core)
        for request in list(core.scheduler):
            if request.inflight:
                self.cancel(request.id, UNAVAILABLE, why)
        self._cover()
        for request in list(core.scheduler):
            if request.state is State.FINISHED:
                continue
            fleet = self.kv_transfers.fleet()
            if fleet.entries:
                self.kv_transfers.drop(request.id)
                self._move(request.id, core, self.cores[self._router.prefill(request, fleet)[0]])
            else:
                self.cancel(request.id, UNAVAILABLE, why)
        self.prefix_fetch.release(core)

    def _cover(self) -> None:
        """Make all instances mixed if those that do not hang could not both prefill and decode otherwise."""
        roles = tuple(scheduler.role for scheduler in self._schedulers)
        serving = [scheduler.role for scheduler in self._schedulers if not scheduler.hung]
        if serving and not complete(serving):
            before = self._covered or roles
            self.set_roles(dict.fromkeys(range(len(roles)), Role.MIXED))
            self._covered = before

    def returned(self, core: Core) -> None:
        """Restore the roles after a hung step has ended after all."""
        if self._covered and not any(scheduler.hung for scheduler in self._schedulers):
            self.set_roles(dict(enumerate(self._covered)))
        self.kv_transfers.place()
        for instance in self.cores:
            instance.wake()

    @property
    def ailment(self) -> str | None:
        """Why the cluster is unhealthy and should get no requests; None if it is healthy."""
        now = self.cores[0].executor.now()
        for core in self.cores:
            if core.scheduler.hung:
                return f"a step of instance {core.name} does not end"
            lately = sum(at > now - 60.0 for at in core.failed)
            if lately >= FAILED_STEPS:
                return f"the last {lately} steps of instance {core.name} failed, all within a minute"
        return None

    def _output(self, delta: Delta) -> None:
        resident = self._residents[delta.request]
        self.ttft_predictions.came(resident.request)
        if delta.finish_reason is not None:
            for held in self._held.pop(delta.request, ()):
                resident.on_output(held)
            del self._residents[delta.request]
            self.kv_transfers.drop(delta.request)
            self.copy_out.finished(resident.request)
            self._finished(resident.request)
            self.ttft_predictions.over(resident.request)
            if not self._residents:
                self._empty.set()
        resident.on_output(delta)

    def check(self) -> None:
        """Assert that no page, slot or request is lost."""
        for core in self.cores:
            core.scheduler.check()
        alive = {request.id for core in self.cores for request in core.scheduler if request.finish_reason is None}
        assert alive.isdisjoint(held := {request.id for request in self.prefix_fetch}), "a held request is scheduled"
        assert alive | held == set(self._residents), "requests of the cluster and of its schedulers differ"


def complete(roles: Iterable[Role]) -> bool:
    """Return whether instances of these roles can both prefill and decode."""
    return set(roles) not in ({Role.PREFILL}, {Role.DECODE}, {Role.PREFILL, Role.MIXED})


def check_roles(roles: Sequence[Role]) -> None:
    """Raise InvalidValue if instances of these roles cannot both prefill and decode."""
    given = [role.value for role in roles]
    if not complete(roles):
        raise InvalidValue(
            f"roles={given} are incomplete: a prefill instance needs a decode instance, and a decode instance needs "
            "a prefill or mixed one",
            "roles",
        )
