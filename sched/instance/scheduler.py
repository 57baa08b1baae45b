"""The mechanism: a policy's Decision + memory + limits become a legal StepPlan; a StepResult becomes state.

Every public method that changes something is an input of later plans, and is logged as such: feeding a journal's
inputs to new Schedulers gives the same plans (see journal.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from ..api.acceptance import Acceptance
from ..api.log import Log, no_log
from ..api.perf import PerfModel
from ..api.plan import Delta, Span, StepPlan, StepResult, Suspended, token_delta
from ..api.policy import Decision, Limits, Policy, Role, Task, View
from ..api.request import Request, State
from .block_pool import BlockPool
from .in_flight import InFlightSteps, Settled, Submitted, task
from .kv_manager import KVManager, Reservation, WriteBack
from .prefix_hits import PrefixHits
from .request_queues import RequestQueues, shown
from .stats import Counters, Drift
from .step_builder import StepBuilder, reserve
from .trials import Trials

WAITED = 0.25  # seconds that count at most of what a step waited for the host


class Scheduler:
    """Requests of one instance. Owner of every Request it holds, of their pages and slots."""

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
        self.hung = False  # its oldest step does not end: no new request comes here
        self._prefix_caching = prefix_caching
        self._log = log
        self._reservations: dict[int, Reservation] = {}
        self._kv = self._new_kv()
        self._queues = RequestQueues(role, PrefixHits(self._kv), shown(limits.rows))
        self._in_flight = InFlightSteps()
        self._drafts = Acceptance()
        self._ended = 0.0  # when the last step ended, executor's clock
        self._waits = False  # there were rows to decode then
        self._drift = Drift()
        self._step = 0
        self._decoded = False  # the step planned last decodes rows
        self._again = inf  # when to ask again whether to stop the running step
        self._trials = Trials()

    def _new_kv(self) -> KVManager:
        blocks = BlockPool(self.limits.pages, self.limits.page_size, prefix_caching=self._prefix_caching)
        return KVManager(blocks, self.limits.rows, self._log)

    # what others may look at

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
    def blocks(self) -> BlockPool:
        return self._kv.blocks

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self.limits.rows - self._kv.free_slots - len(self._reservations)

    @property
    def waiting(self) -> int:
        return len(self) - self.running

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens still to compute here, less what is expected to be in the prefix cache."""
        return self._queues.backlog

    @property
    def decode_context(self) -> int:
        """Sum of the contexts that decode here, those on their way included. Tokens."""
        coming = sum(len(r.pages) for r in self._reservations.values()) * self.limits.page_size
        return int(self._queues.decode.context.sum()) + coming

    @property
    def version(self) -> tuple[object, ...]:
        """Changes whenever `view` does, time aside."""
        queues = self._queues
        return (queues.prefill.version, queues.decode.version, self.perf.version, self.blocks.available, self.steps,
                queues.role)  # fmt: skip

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self.counters.steps

    @property
    def kv_waiting(self) -> int:
        """Requests of other instances waiting for KV pages here."""
        return self._kv_waiting

    def set_kv_waiting(self, count: int) -> None:
        self._kv_waiting = count

    @property
    def ends(self) -> float:
        """Predicted end of the submitted steps, seconds of the executor's clock."""
        return self._ends

    def set_ends(self, at: float) -> None:
        self._ends = at

    @property
    def in_flight(self) -> int:
        """Steps that the executor has."""
        return len(self._in_flight)

    @property
    def oldest(self) -> Submitted | None:
        """The step whose result comes next."""
        return self._in_flight.oldest

    @property
    def predicted(self) -> float:
        """Predicted seconds of the plan made last, or what is left of a resumed one."""
        newest = self._in_flight.newest
        return newest.left if newest is not None else 0.0

    @property
    def asks_again(self) -> float:
        """When to call `interrupts` though nothing happened; inf where only events count."""
        return self._again

    def cached_tokens(self, request: Request) -> int:
        """Prompt tokens of a request that this instance's prefix cache holds."""
        return len(self._kv.cached(request)) * self.limits.page_size

    # inputs: requests

    def add(self, request: Request) -> None:
        """Take over a new request; the Cluster has checked that the KV pool can hold it."""
        self._log("add", request=request)
        self._queues.requests[request.id] = request
        request.drafted = self._drafts.record(request.tier, request.drafted)
        self._queues.file(request)

    def count_demotion(self) -> None:
        """Count a request that admission has made best effort."""
        self.counters.demotions += 1

    def cancel(self, id: int, reason: str, error: str | None = None) -> Delta | None:
        """End a request early; None where it is not here or already over."""
        request = self._queues.requests.get(id)
        if request is None or request.state is State.FINISHED:
            return None
        self._log("cancel", id=id, reason=reason, error=error)
        return self._finish(request, reason, error)

    # inputs: other instances, and the role of this one

    def reserved(self, reservation: Reservation) -> bool:
        """Whether a reservation still stands."""
        return self._reservations.get(reservation.request) is reservation

    def reserve(self, request: Request) -> Reservation | None:
        """Set pages and a slot aside for a request whose prompt another instance computes."""
        self._log("reserve", id=request.id)
        if request.id in self._reservations or any(one.comes_back for one in self._queues.requests.values()):
            return None  # an earlier move still ends here; those whose KV was dropped here come back first
        reservation, dropped = reserve(request, self._queues, self._kv, len(self._reservations))
        self._queues.refresh_hits()
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
        self._kv.release(self._reservations.pop(id))

    def release(self, id: int) -> Request:
        """Let a request go whose KV has been taken elsewhere."""
        self._log("release", id=id)
        request = self._queues.requests.pop(id)
        self._queues.unfile(request)
        computed = request.computed
        self._kv.vacate(request)
        request.computed = computed
        return request

    def accept(self, request: Request, first_token_at: float | None = None) -> None:
        """Take over a request whose KV has arrived in the pages reserved for it.

        `first_token_at` is given where the first token counts only now (`--first-token decode`).
        """
        self._log("accept", id=request.id, first_token_at=first_token_at)
        if first_token_at is not None and len(request.output) == 1:
            request.first_token_at = request.token_times[0] = first_token_at
        self._kv.occupy(request, self._reservations.pop(request.id))
        self._queues.refresh_hits()
        request.state = State.RUNNING
        request.drafted = self._drafts.record(request.tier, request.drafted)
        self._queues.requests[request.id] = request
        self._queues.file(request)

    def reserve_write_back(self, id: int, digests: Sequence[bytes]) -> WriteBack | None:
        """Set pages aside for KV that comes back (kv_transfer.py); None where those that wait may want them."""
        wanted = len(self._queues.decode) + self.blocks.count(self.prefill_backlog)
        returned = self._kv.reserve_write_back(id, digests, wanted)
        self._queues.refresh_hits()
        return returned

    def finish_write_back(self, id: int, arrived: bool) -> None:
        """The KV that came back, or did not, is nobody's."""
        self._kv.finish_write_back(id, arrived)
        self._queues.refresh_hits()

    def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes that no request holds."""
        self._log("reset_prefix_cache")
        self.blocks.forget_idle()
        self._queues.refresh_hits()

    def hang(self, hung: bool) -> None:
        """Take note that the oldest step does not end, or has ended after all."""
        self._log("hang", hung=hung)
        self.hung = hung

    def set_role(self, role: Role, first_token_at: float | None = None) -> None:
        """Change what the instance is for. Nobody here loses anything: what was to be decoded elsewhere decodes here
        where the instance prefills no more, and what decodes goes on until there is room for it elsewhere (`leave`).

        `first_token_at` is given where the first token counts only when its KV stands where it is decoded.
        """
        self._log("set_role", role=role.value, first_token_at=first_token_at)
        for request in self._queues.set_role(role):
            if first_token_at is not None and len(request.output) == 1:
                request.first_token_at = request.token_times[0] = first_token_at

    def decode_in_place(self, id: int, first_token_at: float | None = None) -> None:
        """There is no room elsewhere for a request whose prompt is done: it decodes here until there is (`leave`).

        `first_token_at` is given where the first token counts only when its KV stands where it is decoded.
        """
        self._log("decode_in_place", id=id, first_token_at=first_token_at)
        request = self._queues.requests[id]
        if first_token_at is not None and len(request.output) == 1:
            request.first_token_at = request.token_times[0] = first_token_at
        request.state, request.decodes_in_place = State.RUNNING, True
        self._queues.file(request)

    def leave(self, id: int) -> None:
        """There is room elsewhere for a row that decodes here: it is planned no more, and moves when what is submitted
        of it has ended."""
        self._log("leave", id=id)
        request = self._queues.requests[id]
        request.decodes_in_place = False
        if request.remaining == 1 and not request.inflight:
            request.state = State.TRANSFERRING
        self._queues.file(request)

    # inputs: steps

    def plan(self, now: float, start: float) -> StepPlan | None:
        """The next step, to begin at `start`; None where nothing can run."""
        self._log("plan", now=now, start=start, kv_waiting=self.kv_waiting)
        queues, in_flight = self._queues, self._in_flight
        trial = self._trials.decide(queues, self._kv, self.limits.tokens)
        decision = trial or self.policy.decide(self.view(now, start))
        self._again = decision.again
        for id in decision.demote:
            self.counters.demotions += queues.demote(id)
        if decision.resume is not None:
            return self._resume(decision.resume)
        builder = StepBuilder(
            queues, self._kv, self.limits, start, busy=bool(in_flight), kv_waiting=self.kv_waiting > 0
        )
        granted = builder.build(decision)
        queues.refresh_hits()
        self.counters.count(granted)
        if not granted.spans:  # what is suspended holds pages
            return self._resume(next(iter(in_flight.suspended))) if in_flight.suspended and not in_flight else None
        self._step += 1
        self._decoded = granted.load.decode > 0
        preemptible = self.limits.preemptible and not (granted.load.decode or trial)
        plan = StepPlan(self._step, granted.spans, preemptible and len(in_flight.suspended) < self.limits.suspended)
        in_flight.submit(plan, granted.load, self.perf.step_time(granted.load))
        self._log("planned", plan=plan)
        return plan

    def view(self, now: float, start: float, running: Task | None = None) -> View:
        """What a policy sees of this instance."""
        queues = self._queues
        return View(
            now, start, queues.seen_as, queues.prefill, queues.decode, self.limits, self.blocks.available,
            self._kv.free_slots, self.kv_waiting, self.perf, self._in_flight.tasks(queues.requests), running,
            self._drafts.all.acceptance, self._drift.ratio, self._decoded,
        )  # fmt: skip

    def _resume(self, step: int) -> StepPlan:
        if step not in self._in_flight.suspended:
            raise AssertionError(f"the policy resumes step {step}, which is not suspended")
        self._step += 1
        self._decoded = False
        plan = self._in_flight.resume(step, self._step)
        for span in plan.spans:
            self._suspend(span.request, False)
        self.counters.resumed += 1
        self._log("planned", plan=plan)
        return plan

    def interrupts(self, now: float) -> bool:
        """Whether to stop the running step, which is preemptible, at its next boundary."""
        oldest = self._in_flight.oldest
        if oldest is None or not oldest.plan.preemptible:
            return False
        self._log("interrupts", now=now, ends=self.ends, kv_waiting=self.kv_waiting)
        running = task(oldest, max(0.0, self.ends - now), self._queues.requests, self.ends - oldest.left)
        decision: Decision = self.policy.decide(self.view(now, now, running))
        for id in decision.demote:
            self.counters.demotions += self._queues.demote(id)
        self._again = decision.again if decision.again > now else inf
        if decision.preempt:
            oldest.asked = now
        return decision.preempt

    def suspend(self, result: Suspended) -> None:
        """The running step stopped at a boundary: its requests wait for it to go on."""
        self._log("suspend", result=result)
        self.counters.suspended += 1
        submitted = self._in_flight.suspend(result)
        self._came_back(submitted, result.at)
        for span in submitted.plan.spans:
            self._suspend(span.request, True)

    def _came_back(self, submitted: Submitted, at: float) -> None:
        """Count how long a step that was asked to stop kept the devices."""
        if submitted.asked is not None:
            self.counters.stopped(max(0.0, at - submitted.asked))
            submitted.asked = None

    def _suspend(self, id: int, suspended: bool) -> None:
        request = self._queues.requests[id]
        request.suspended = suspended
        if request.state is not State.FINISHED:
            self._queues.file(request)

    def settle(self, result: StepResult) -> Settled:
        """Take in the result of the oldest submitted step."""
        self._log("settle", result=result)
        submitted = self._in_flight.land(result)
        self._came_back(submitted, result.finished)
        seconds = submitted.ran + result.finished - result.started
        self.counters.step(submitted.load, submitted.seconds, seconds)
        if not self.hung:  # how long a device hung says nothing of how long steps take
            self._drift.count(submitted.seconds, seconds)
        prefills, requests = self.role is Role.PREFILL, self._queues.requests
        deltas: list[Delta] = []
        advanced: list[tuple[Request, int]] = []
        for index, span in enumerate(submitted.plan.spans):
            request = requests[span.request]
            request.inflight -= 1
            if request.failures:
                self._trials.passed(request, span.start + span.length)
            if request.state is State.FINISHED:
                self.counters.surplus_tokens += span.length
                self._forget(request)
                continue
            if index in result.failed:
                deltas += self._condemn(request, result.failed[index])
                continue
            if prefills and span.samples and not (request.decodes_in_place or request.inflight):
                request.state = State.TRANSFERRING
            end = span.start + span.length
            if span.draft:
                end = self._verify(request, span, len(result.tokens[index]))
            elif self._prefix_caching:
                self._kv.register(request, span.start, end)
            delta = self._gain(request, result, index, span.start)
            if delta is not None:
                deltas.append(delta)
            if span.draft:
                finished = request.state is State.FINISHED
                self._drafts.count(request.tier, request.drafted, span.draft, end - span.start - 1, cut=finished)
                if request.state is not State.FINISHED:
                    self._kv.register(request, span.start, end)
                    self._queues.file(request)
            if prefills and request.state is not State.FINISHED:
                advanced.append((request, end))
        self._queues.refresh_hits()
        gap = self._gap(result)
        if not self.hung:
            self.perf.observe(submitted.load, seconds + gap)
        return Settled(tuple(deltas), tuple(advanced))

    def _gap(self, result: StepResult) -> float:
        """Where rows may draft, what the device waited for a step though there were rows to decode: part of what it
        takes. Rows that draft cannot be planned ahead, so that their steps wait for the host."""
        gap = result.started - self._ended
        counts = self.limits.draft and self._waits
        self._ended, self._waits = result.finished, len(self._queues.decode) > 0 or bool(self._in_flight)
        return min(max(gap, 0.0), WAITED) if counts else 0.0

    def recover(self) -> list[Delta]:
        """A step raised and the pool is new: every request here loses its KV and keeps its tokens. Those of the step
        run alone from then on (trials.py); the one whose span fails alone ends in an error."""
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
                deltas.append(self._finish(request, "error", "the step that computed this request failed twice"))
            else:
                self._queues.file(request)
        return deltas

    def check(self) -> None:
        """Raises AssertionError where a page, a slot or a request is lost."""
        self._kv.check(self, self._reservations.values(), self.limits.rows)
        self._queues.check()

    # from a result to state

    def _verify(self, request: Request, span: Span, gained: int) -> int:
        """Take back what the cursor ran ahead for drafts that were wrong; returns where valid KV ends."""
        wrong = span.length - gained
        request.drafting = 0
        request.computed -= wrong
        request.take_back(wrong)
        self.counters.verified(span.draft, gained - 1)
        return span.start + gained

    def _gain(self, request: Request, result: StepResult, index: int, start: int) -> Delta | None:
        """Append the sampled tokens, up to the one that ends the request."""
        tokens = result.tokens[index]
        logprobs = result.logprobs.get(index, ()) if result.logprobs else ()
        prompt_logprobs = result.prompt_logprobs.get(index, ()) if result.prompt_logprobs else ()
        if prompt_logprobs:  # what was told before its KV was dropped is not told again
            prompt_logprobs = prompt_logprobs[max(0, request.scored - start) :]
            request.scored = max(request.scored, start + len(result.prompt_logprobs[index]))
        if not tokens:
            return Delta(request.id, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        reason = stop_token = None
        stage = request.stage
        for count, token in enumerate(tokens, 1):
            reason = request.gain(token, result.finished)
            if reason is not None:
                tokens, logprobs = tokens[:count], logprobs[:count]
                stop_token = token if reason == "stop" else None
                break
        self.counters.generated_tokens += len(tokens)
        if reason is not None:
            self._finish(request, reason)
        elif len(request.output) == 1 or request.stage is not stage:
            self._queues.file(request)  # its deadline has a new anchor
        if reason is None and not logprobs and not prompt_logprobs:
            return token_delta(request.id, tokens)
        return Delta(request.id, tokens, logprobs, prompt_logprobs, reason, None, stop_token)

    def _condemn(self, request: Request, why: str) -> list[Delta]:
        """End a request whose row failed, and those that share the pages which it filled."""
        own = self._kv.condemn(request)
        sharers = [one for one in self if one is not request and not own.isdisjoint(one.pages)]
        return [self._finish(one, "error", why) for one in (request, *sharers) if one.state is not State.FINISHED]

    def _finish(self, request: Request, reason: str, error: str | None = None) -> Delta:
        request.state, request.finish_reason, request.error = State.FINISHED, reason, error
        self._queues.unfile(request)
        self._forget(request)
        return Delta(request.id, finish_reason=reason, error=error)

    def _forget(self, request: Request) -> None:
        """Give a finished request's pages back, once no submitted step touches them."""
        if request.inflight == 0:
            self._kv.vacate(request)
            self._queues.requests.pop(request.id, None)
