"""The scheduler of one instance: turns decisions of the policy into legal StepPlans, and results into state.

Every public method that changes state is an input of later plans, and is logged. New Schedulers
that get the inputs in a journal make the same plans (see journal.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from ..api.acceptance import Acceptance
from ..api.errors import PolicyError
from ..api.log import Log, no_log
from ..api.perf import PerfModel
from ..api.plan import Delta, StepPlan, StepResult, Suspended
from ..api.policy import Decision, Limits, Policy, Role, Task, View
from ..api.request import Request, State
from ..feasibility import rest_of_prompt
from .block_pool import BlockPool
from .in_flight import InFlightSteps, Submitted, task
from .kv_manager import KVManager, Reservation, WriteBack
from .prefix_groups import PrefixGroups
from .prefix_hits import PrefixHits
from .request_queues import RequestQueues, shown
from .stats import Counters, Drift, HostGap
from .step_builder import StepBuilder, reserve
from .step_settler import Settled, StepSettler, finish
from .trials import Trials


class Scheduler:
    """The scheduler of one instance. Owner of its requests, their pages and their slots."""

    def __init__(
        self,
        policy: Policy,
        perf: PerfModel,
        limits: Limits,
        role: Role = Role.MIXED,
        *,
        prefix_caching: bool = True,
        log: Log = no_log,
    ) -> None:
        self.policy = policy
        self.perf = perf
        self.limits = limits
        self._kv_waiting = 0
        self._ends = 0.0
        self.counters = Counters()
        self.hung = False  # its oldest step does not end, so it gets no new requests
        self.draining = False  # it gets no new requests because it is about to stop; set by its owner
        self._prefix_caching = prefix_caching
        self._log = log
        self._reservations: dict[int, Reservation] = {}
        self._kv = self._new_kv()
        self._queues = RequestQueues(role, PrefixHits(self._kv), shown(limits.rows))
        self._in_flight = InFlightSteps()
        self._drafts = Acceptance()
        self._host_gap = HostGap(bool(limits.draft))
        self._drift = Drift()
        self._adopted = 0  # step-time models after the first
        self._step = 0
        self._decoded = False  # the last planned step contains decodes
        self._again = inf  # when to ask the policy again whether to stop the running step
        self._trials = Trials()
        self._prefixes = PrefixGroups(limits.rows, limits.page_size) if limits.cascade else None

    def _new_kv(self) -> KVManager:
        blocks = BlockPool(self.limits.pages, self.limits.page_size, prefix_caching=self._prefix_caching)
        limits = self.limits
        return KVManager(blocks, limits.rows, self._log, limits.session_share, limits.session_timeout)

    # Read-only state.

    def __len__(self) -> int:
        return len(self._queues.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queues.requests.values())

    def __contains__(self, id: int) -> bool:
        return id in self._queues.requests

    @property
    def role(self) -> Role:
        return self._queues.role

    @property
    def accepting(self) -> bool:
        """Whether it takes new requests."""
        return not (self.hung or self.draining)

    @property
    def blocks(self) -> BlockPool:
        return self._kv.blocks

    @property
    def pinned(self) -> int:
        """Cached pages that sessions pin."""
        return self.blocks.pinned

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self.limits.rows - self._kv.free_slots - len(self._reservations)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self) - self.running

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens to compute, without expected prefix-cache hits."""
        return self._queues.backlog

    @property
    def decode_context(self) -> int:
        """Total context of the running decodes and of those being transferred here, in tokens."""
        coming = sum(len(r.pages) for r in self._reservations.values()) * self.limits.page_size
        return int(self._queues.decode.context.sum()) + coming

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes whenever `view` changes other than by time."""
        queues = self._queues
        return (queues.prefill.version, queues.decode.version, self.perf.version, self.blocks.available, self.steps,
                queues.role, self._adopted)  # fmt: skip

    @property
    def steps(self) -> int:
        """Completed steps."""
        return self.counters.steps

    @property
    def kv_waiting(self) -> int:
        """Requests of other instances that wait for KV pages here."""
        return self._kv_waiting

    def set_kv_waiting(self, count: int) -> None:
        self._kv_waiting = count

    @property
    def ends(self) -> float:
        """Predicted end of the submitted steps, in seconds on the executor's clock."""
        return self._ends

    def set_ends(self, at: float) -> None:
        self._ends = at

    @property
    def in_flight(self) -> int:
        """Submitted steps without a result yet."""
        return len(self._in_flight)

    @property
    def oldest(self) -> Submitted | None:
        """The step with the next result."""
        return self._in_flight.oldest

    @property
    def predicted(self) -> float:
        """Predicted seconds of the last plan, or of the rest of a resumed step."""
        newest = self._in_flight.newest
        return newest.left if newest is not None else 0.0

    @property
    def asks_again(self) -> float:
        """When to call `interrupts` even without an event; inf if never."""
        return self._again

    def cached_tokens(self, request: Request) -> int:
        """Return how many prompt tokens of a request are in the prefix cache of this instance."""
        return len(self._kv.cached(request)) * self.limits.page_size

    def sought(self, request: Request) -> Sequence[bytes]:
        """Return the digests of the pages of a request that are looked up in the prefix cache."""
        return self._kv.sought(request)

    # Inputs: requests.

    def add(self, request: Request, predicted: float | None = None) -> None:
        """Add a new request. The Cluster has checked that the KV pool can hold it.

        predicted: its TTFT in seconds, for the log.
        """
        self._log("add", request=request, predicted=predicted)
        self._queues.requests[request.id] = request
        request.drafted = self._drafts.record(request.tier, request.drafted)
        self._queues.file(request)

    def count_demotion(self) -> None:
        """Count a request that admission made best effort."""
        self.counters.demotions += 1

    def _demote(self, ids: Sequence[int], now: float, start: float) -> None:
        """Make requests best effort, and log how far each was from its deadline.

        `due`: seconds until the deadline of its next token. `needs`: seconds until this token if nothing else ran.
        """
        for id in ids:
            if not self._queues.demote(id):
                continue
            self.counters.demotions += 1
            request = self._queues.requests[id]
            needs = rest_of_prompt(self.perf, request, self.limits.tokens) * self._drift.ratio + start - now
            self._log("demoted", id=id, due=request.deadline - now, needs=needs)

    def cancel(self, id: int, reason: str, error: str | None = None) -> Delta | None:
        """End a request early. Returns None if it is not here or has finished."""
        request = self._queues.requests.get(id)
        if request is None or request.state is State.FINISHED:
            return None
        self._log("cancel", id=id, reason=reason, error=error)
        return finish(request, self._queues, self._kv, reason, error)

    # Inputs: transfers and role changes.

    def reserved(self, reservation: Reservation) -> bool:
        """Return whether a reservation is still valid."""
        return self._reservations.get(reservation.request) is reservation

    def reserve(self, request: Request) -> Reservation | None:
        """Reserve pages and a slot for a request whose prompt another instance computes."""
        self._log("reserve", id=request.id)
        if request.id in self._reservations or any(other.comes_back for other in self._queues.requests.values()):
            return None  # an earlier transfer has not ended, or requests that lost their KV here come first
        reservation, dropped = reserve(request, self._queues, self._kv, len(self._reservations))
        self._queues.refresh_hits()
        self.counters.preemptions += dropped
        if reservation is not None:
            self._reservations[request.id] = reservation
        return reservation

    def unreserve(self, reservation: Reservation) -> None:
        """Release a reservation. Does nothing if a step that raised has already released it."""
        if self.reserved(reservation):
            self.unreserve_id(reservation.request)

    def unreserve_id(self, id: int) -> None:
        """Release the reservation of a request."""
        self._log("unreserve", id=id)
        self._kv.release(self._reservations.pop(id))

    def release(self, id: int) -> Request:
        """Remove a request that moves to another instance, and release its pages."""
        self._log("release", id=id)
        request = self._queues.requests.pop(id)
        self._queues.unfile(request)
        computed = request.computed
        self._kv.pin(request)
        self._kv.vacate(request)
        request.computed = computed
        return request

    def accept(self, request: Request, first_token_at: float | None = None) -> None:
        """Take ownership of a request whose KV has arrived in its reserved pages.

        `first_token_at` is set if its first token counts from now (`--first-token decode`).
        """
        self._log("accept", id=request.id, first_token_at=first_token_at)
        request.count_first_token(first_token_at)
        self._kv.occupy(request, self._reservations.pop(request.id))
        self._queues.refresh_hits()
        request.state = State.RUNNING
        request.slow = request.held = False
        request.drafted = self._drafts.record(request.tier, request.drafted)
        self._queues.requests[request.id] = request
        self._queues.file(request)

    def reserve_write_back(self, id: int, digests: Sequence[bytes]) -> WriteBack | None:
        """Reserve pages for a KV write-back (kv_transfer.py).

        Returns None if waiting requests may need the pages.
        """
        wanted = len(self._queues.decode) + self.blocks.count(self.prefill_backlog)
        returned = self._kv.reserve_write_back(id, digests, wanted)
        self._queues.refresh_hits()
        return returned

    def finish_write_back(self, id: int, arrived: bool) -> None:
        """Release the pages of a write-back, into the prefix cache if its KV arrived."""
        self._kv.finish_write_back(id, arrived)
        self._queues.refresh_hits()

    def end_session(self, session: str) -> bool:
        """Release the pages that a session keeps between turns; return whether it kept any."""
        self._log("end_session", session=session)
        return self._kv.pins.end(session)

    def reset_prefix_cache(self) -> None:
        """Clear the cached prefixes that no request holds."""
        self._log("reset_prefix_cache")
        self._kv.forget_cached()
        self._queues.refresh_hits()

    def hang(self, hung: bool) -> None:
        """Record that the oldest step hangs, or has ended after all."""
        self._log("hang", hung=hung)
        self.hung = hung

    def set_role(self, role: Role, first_token_at: float | None = None) -> None:
        """Change the role of the instance. No request loses its KV or a token.

        If it no longer is a prefill instance, requests that waited to be decoded elsewhere decode
        here. If it becomes one, its running decodes go on until there is room elsewhere (`leave`).

        `first_token_at` is set if the first token of the former counts from now (`--first-token
        decode`).
        """
        self._log("set_role", role=role.value, first_token_at=first_token_at)
        for request in self._queues.set_role(role):
            request.count_first_token(first_token_at)

    def decode_in_place(self, id: int, first_token_at: float | None = None) -> None:
        """Decode a computed prompt here until there is room elsewhere (`leave`).

        `first_token_at` is set if its first token counts from now (`--first-token decode`).
        """
        self._log("decode_in_place", id=id, first_token_at=first_token_at)
        request = self._queues.requests[id]
        request.count_first_token(first_token_at)
        request.state, request.decodes_in_place = State.RUNNING, True
        self._queues.file(request)

    def leave(self, id: int) -> None:
        """Stop planning a request that decodes here and has room elsewhere now.

        It moves once its submitted steps have ended.
        """
        self._log("leave", id=id)
        request = self._queues.requests[id]
        request.decodes_in_place = False
        if request.remaining == 1 and not request.inflight:
            request.state = State.TRANSFERRING
        self._queues.file(request)

    def adopt(self, perf: PerfModel, stairs: tuple[int, ...], recipe: Mapping[str, Any]) -> None:
        """Take over another step-time model and the sizes it pads to, because the engine has more programs now.

        stairs: see `Limits`. recipe: what a replay makes `perf` from, as of `Journal.instance`.
        """
        self._log("adopt", stairs=stairs, recipe=recipe)
        self.perf, self.limits = perf, replace(self.limits, stairs=stairs)
        self._adopted += 1

    # Inputs: steps.

    def plan(self, now: float, start: float) -> StepPlan | None:
        """Plan the next step, which begins at `start`. Returns None if nothing can run."""
        self._log("plan", now=now, start=start, kv_waiting=self.kv_waiting)
        queues, in_flight = self._queues, self._in_flight
        self._kv.pins.expire(now)
        trial = self._trials.decide(queues, self._kv, self.limits.tokens)
        decision = trial or self.policy.decide(self.view(now, start))
        self._again = decision.again
        self._demote(decision.demote, now, start)
        if decision.resume is not None:
            return self._resume(decision.resume)
        builder = StepBuilder(
            queues, self._kv, self.limits, start, busy=bool(in_flight), kv_waiting=self.kv_waiting > 0,
            seconds=None if trial else self.perf.step_time,
        )  # fmt: skip
        running = int(queues.decode.running.sum())
        granted = builder.build(decision)
        queues.refresh_hits()
        self.counters.count(granted)
        self.counters.unpinned(self._kv.pins.take_totals())
        if not granted.spans:  # suspended steps hold pages, so resume one of them
            return self._resume(next(iter(in_flight.suspended))) if in_flight.suspended and not in_flight else None
        self._step += 1
        self._decoded = granted.load.decode > 0
        self.counters.left(granted, running)
        preemptible = self.limits.preemptible and not (granted.load.decode or trial)
        preemptible = preemptible and len(in_flight.suspended) < self.limits.suspended
        shared = () if self._prefixes is None else self._prefixes.groups(granted.spans)
        load = granted.load.share(shared, self.limits.page_size) if shared else granted.load
        plan = StepPlan(self._step, granted.spans, preemptible, shared=shared)
        in_flight.submit(plan, load, self.perf.step_time(load))
        self._log("planned", plan=plan)
        return plan

    def view(self, now: float, start: float, running: Task | None = None) -> View:
        """Return the view of this instance for its policy."""
        queues = self._queues
        return View(
            now, start, queues.seen_as, queues.prefill, queues.decode, self.limits, self.blocks.available,
            self._kv.free_slots, self.kv_waiting, self.perf, self._in_flight.tasks(queues.requests), running,
            self._drafts.all.acceptance, self._drift.ratio, self._decoded,
        )  # fmt: skip

    def _resume(self, step: int) -> StepPlan:
        if step not in self._in_flight.suspended:
            raise PolicyError(f"the policy resumes step {step}, which is not suspended")
        self._step += 1
        self._decoded = False
        plan = self._in_flight.resume(step, self._step)
        for span in plan.spans:
            self._suspend(span.request, False)
        self.counters.resumed += 1
        self._log("planned", plan=plan)
        return plan

    def interrupts(self, now: float) -> bool:
        """Ask the policy whether to stop the running step, if preemptible, at its next boundary."""
        oldest = self._in_flight.oldest
        if oldest is None or not oldest.plan.preemptible:
            return False
        self._log("interrupts", now=now, ends=self.ends, kv_waiting=self.kv_waiting)
        running = task(oldest, max(0.0, self.ends - now), self._queues.requests, self.ends - oldest.left)
        decision: Decision = self.policy.decide(self.view(now, now, running))
        self._demote(decision.demote, now, now)
        self._again = decision.again if decision.again > now else inf
        if decision.preempt:
            oldest.asked = now
        return decision.preempt

    def suspend(self, result: Suspended) -> None:
        """Record that the running step stopped at a boundary. Its requests wait until it resumes."""
        self._log("suspend", result=result)
        self.counters.suspended += 1
        submitted = self._in_flight.suspend(result)
        self._came_back(submitted, result.at)
        for span in submitted.plan.spans:
            self._suspend(span.request, True)

    def _came_back(self, submitted: Submitted, at: float) -> None:
        """Count how long a step that was asked to stop still ran."""
        if submitted.asked is not None:
            self.counters.stopped(max(0.0, at - submitted.asked))
            submitted.asked = None

    def _suspend(self, id: int, suspended: bool) -> None:
        request = self._queues.requests[id]
        request.suspended = suspended
        if request.state is not State.FINISHED:
            self._queues.file(request)

    def settle(self, result: StepResult) -> Settled:
        """Apply the result of the oldest submitted step."""
        self._log("settle", result=result)
        submitted = self._in_flight.land(result)
        self._came_back(submitted, result.finished)
        seconds = submitted.ran + result.finished - result.started
        self.counters.step(submitted.load, submitted.seconds, seconds)
        if not self.hung:  # a hung step says nothing about normal step times
            self._drift.count(submitted.seconds, seconds)
        settler = StepSettler(self._queues, self._kv, self.counters, self._drafts, self._trials)
        settled = settler.settle(submitted.plan, result)
        self._queues.refresh_hits()
        gap = self._host_gap.before(
            result.started, result.finished, len(self._queues.decode) > 0 or bool(self._in_flight)
        )
        if not self.hung:
            self.perf.observe(submitted.load, seconds + gap)
        return settled

    def holds(self, id: int, slot: int) -> bool:
        """Return whether a request is in a slot, in no step, and waits for `unhold`."""
        request = self._queues.requests.get(id)
        if request is None or request.state is State.FINISHED:
            return False
        return request.held and not request.inflight and request.slot == slot

    def unhold(self, id: int, slot: int) -> None:
        """Record that it is known what a held request in a slot may sample next."""
        self._log("unhold", id=id, slot=slot)
        if self.holds(id, slot):
            request = self._queues.requests[id]
            request.held = False
            self._queues.file(request)

    def recover(self) -> list[Delta]:
        """Reset after a step that raised, with a new KV pool. Requests lose their KV and keep their tokens.

        Requests of the failed step then run alone (trials.py), and only the one whose span fails
        alone ends in an error.
        """
        self._log("recover")
        self.counters.rebuilds += 1
        oldest = self._in_flight.oldest
        blamed = {} if oldest is None else {span.request: span.start + span.length for span in oldest.plan.spans}
        self._in_flight.clear()
        self._reservations.clear()
        self._kv = self._new_kv()
        self._queues.hits = PrefixHits(self._kv)
        deltas = []
        for request in list(self._queues.requests.values()):
            request.forget_cache()
            if request.state is State.FINISHED:
                del self._queues.requests[request.id]
                continue
            request.state = State.WAITING
            if request.id in blamed:
                self._trials.add(request, blamed[request.id])
            if request.failures > 1 and len(blamed) == 1:
                why = "the step that computed this request failed twice"
                deltas.append(finish(request, self._queues, self._kv, "error", why))
            else:
                self._queues.file(request)
        return deltas

    def check(self) -> None:
        """Assert that no page, slot or request is lost."""
        self._kv.check(self, self._reservations.values(), self.limits.rows)
        self._queues.check()
