"""The recent steps, events and requests of an engine, from which a request's timeline and explanation are made.

Bounded in steps, running decodes and requests. It holds lengths, times and names, but no tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf, nan
from typing import Any, NamedTuple

from jaxserve.engine.runtime.condensed_steps import condensed
from jaxserve.engine.runtime.step_record import Step
from jaxserve.sched.api.log import Log
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Span, StepPlan, Suspended
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.metrics import measure, stage_allowance
from jaxserve.sched.recorded.record import Demoted, Moved, Placed, Recorder, Stretch, demoted_on_arrival

STEPS = 30_000
ROWS = 4_000_000  # running decodes in these steps, 4 bytes each
REQUESTS = 2_000  # that have ended
TOKENS = 500_000  # of their outputs, 32 bytes each
KNOWN = 4 * REQUESTS  # whose lengths are known
EVENTS = 1_000


class Event(NamedTuple):
    """Something that happened on an instance.

    kind: stop (a prefill step stopped at a segment boundary), demotion, deflection, move (with KV), reroute (without),
    preemption (KV dropped), role, hang, failure.
    """

    number: int
    ago: float  # seconds before `Recent` was made
    kind: str
    instance: str
    request: int | None = None
    client: str = ""  # of the request
    text: str = ""  # where it came from, or the new role
    amount: int = 1


class EndedRequest(NamedTuple):
    """One line about a request that has ended. Times in seconds, not finite where unknown."""

    number: int
    ago: float  # seconds from its last token until `Recent` was made
    id: int
    key: str
    client: str
    class_: str
    tier: str  # best_effort after a demotion
    prompt: int  # tokens
    output: int
    waited: float  # from arrival to its first step
    ttft: float
    tpot: float
    slo_ttft: float
    slo_tpot: float
    predicted: float  # TTFT
    attained: bool
    reason: str
    promised: bool = True  # whether it has an objective


class Recent(NamedTuple):
    """What has happened since a number that an earlier one had."""

    number: int
    events: tuple[Event, ...] = ()
    requests: tuple[EndedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestLife:
    """What is known of one request, and of its instances meanwhile. Times on the engine's clock."""

    id: int
    key: str
    client: str
    class_: str
    tier: str
    slo: SLO
    arrival: float
    prompt: int
    cached: int
    drops: int
    token_times: tuple[float, ...]
    first_token_at: float | None
    finish_reason: str | None
    error: str | None
    allowance: float | None
    predicted: float | None
    steps: tuple[Step, ...] = ()
    placed: tuple[Placed, ...] = ()
    moves: tuple[Moved, ...] = ()
    lengths: Mapping[int, int] = field(default_factory=dict)  # tokens of the prompts of requests in the steps, and more
    others: tuple[int, ...] = ()  # of these, requests of other clients
    demoted: Demoted | None = None
    ended: float | None = None

    def recorder(self) -> Recorder:
        """Return the same as a Recorder, for `explain`."""
        recorder = Recorder()
        recorder.placed, recorder.moves = list(self.placed), list(self.moves)
        if self.demoted is not None:
            recorder.demoted[self.id] = self.demoted
        steps = condensed(self.steps, self.id, self.first_token_at)
        recorder.stretches = [_stretch(number, step, self.lengths) for number, step in enumerate(steps)]
        requests = {span.request for stretch in recorder.stretches for span in stretch.plan.spans}
        recorder.requests = {id: _bare(id, self.lengths[id]) for id in requests}
        recorder.requests[self.id] = self._request()
        recorder.hidden = frozenset(self.others)
        return recorder

    def _request(self) -> Request:
        asked = NewRequest(range(self.prompt), SamplingParams(), self.slo, tier=self.tier, key=self.key)
        request = Request(self.id, asked, self.arrival, class_=self.class_)
        request.cached, request.drops, request.error = self.cached, self.drops, self.error
        request.token_times, request.first_token_at = list(self.token_times), self.first_token_at
        request.finish_reason = self.finish_reason
        if self.allowance is not None:  # as `stage_allowance` reads it
            request.budget = self.allowance + self.slo.tpot_of(request.stage)
        return request


def _bare(id: int, length: int) -> Request:
    return Request(id, NewRequest(range(length), SamplingParams(), SLO()), 0.0)


def _stretch(number: int, step: Step, lengths: Mapping[int, int]) -> Stretch:
    chunks = (chunk for chunk in step.chunks if chunk[0] in lengths)
    spans = [Span(id, 0, start, length, samples=samples) for id, start, length, samples in chunks]
    drafts = array("i", step.drafts) if step.drafts else array("i", bytes(len(step.rows)))
    for id, draft in zip(array("i", step.rows), drafts, strict=True):
        if id in lengths:
            spans.append(Span(id, 0, max(step.context, lengths[id]), 1 + draft, draft=draft, samples=True))
    return Stretch(step.instance, StepPlan(number, tuple(spans)), step.start, step.end, step.stopped)


class FlightRecorder:
    """Records what is passed to the logs of the schedulers. Writer: the engine's thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._schedulers: dict[str, Scheduler] = {}
        self.clear()

    def clear(self) -> None:
        """Forget everything but the instances."""
        self._number = 0  # of the last event or ended request
        self._steps: deque[Step] = deque()
        self._rows = self._tokens = 0  # in `_steps`, and in outputs of `_ended`
        self._events: deque[tuple[float, Event]] = deque(maxlen=EVENTS)
        self._running: dict[int, Request] = {}
        self._lengths: dict[int, int] = {}  # of prompts that may be in `_steps`, oldest first
        self._clients: dict[int, str] = {}  # likewise
        self._places: dict[int, tuple[list[Placed], list[Moved]]] = {}  # of running and ended requests
        self._demoted: dict[int, Demoted] = {}  # likewise
        self._ended: dict[int, tuple[RequestLife, EndedRequest]] = {}  # oldest first

    def instance(self, name: str, then: Log) -> Log:
        """Return the log of one instance. It passes all records on to `then`."""
        plans: dict[int, StepPlan] = {}
        reserved: dict[int, float] = {}
        preemptions = 0  # so far

        def log(kind: str, **fields: Any) -> None:
            nonlocal preemptions
            then(kind, **fields)
            if kind == "planned":
                plans[fields["plan"].step] = fields["plan"]
                before, preemptions = preemptions, self._schedulers[name].counters.preemptions
                if preemptions > before:  # by the plan before: they have no record of their own
                    self._event("preemption", name, amount=preemptions - before)
            elif kind in ("settle", "suspend"):
                result = fields["result"]
                self._step(name, plans.pop(result.step, None), result)
            elif kind == "add":
                self._add(name, fields["request"])
            elif kind == "demoted":
                id = fields["id"]
                self._demote(Demoted(self._now(), name, id, fields["due"], fields["needs"]))
            elif kind == "reserve":
                reserved[fields["id"]] = self._now()  # repeated until there is room: the last one counts
            elif kind == "unreserve":
                reserved.pop(fields["id"], None)
            elif kind == "accept":
                self._accept(name, fields["id"], reserved.pop(fields["id"], self._now()))
            elif kind == "set_role":
                self._event("role", name, text=fields["role"])
            elif kind == "hang":
                self._event("hang", name, text="" if fields["hung"] else "ended after all")
            elif kind == "recover":
                plans.clear()
                reserved.clear()
                self._event("failure", name)

        return log

    def attach(self, name: str, scheduler: Scheduler) -> None:
        """Set the scheduler of an instance, to record the queue that a request finds there."""
        self._schedulers[name] = scheduler

    def _event(self, kind: str, instance: str, request: int | None = None, text: str = "", amount: int = 1) -> None:
        self._number += 1
        client = "" if request is None else self._clients.get(request, "")
        self._events.append((self._now(), Event(self._number, 0.0, kind, instance, request, client, text, amount)))

    def _demote(self, demoted: Demoted) -> None:
        self._demoted[demoted.request] = demoted
        self._event("demotion", demoted.instance, demoted.request)

    def _add(self, name: str, request: Request) -> None:
        scheduler, id = self._schedulers[name], request.id
        again = id in self._running
        self._running[id] = request
        self._lengths[id], self._clients[id] = request.prompt_length, request.asked.client
        for old in list(islice(self._lengths, max(0, len(self._lengths) - KNOWN))):
            if old not in self._running:
                del self._lengths[old], self._clients[old]
        placed, _ = self._places.setdefault(id, ([], []))
        before = placed[-1].instance if placed else ""
        placed.append(Placed(self._now(), name, id, scheduler.waiting, scheduler.prefill_backlog))
        if id not in self._demoted and (demoted := demoted_on_arrival(request, self._now(), name)) is not None:
            self._demote(demoted)
        if scheduler.role is Role.DECODE:
            self._event("deflection", name, id)
        elif again:
            self._event("reroute", name, id, before)

    def _accept(self, name: str, id: int, reserved: float) -> None:
        placed, moves = self._places.setdefault(id, ([], []))
        source = moves[-1].target if moves else placed[-1].instance if placed else ""
        moves.append(Moved(self._now(), id, source, name, reserved))
        self._event("move", name, id, source)

    def _step(self, name: str, plan: StepPlan | None, result: Any) -> None:
        if plan is None:  # planned before `clear`
            return
        stopped = isinstance(result, Suspended)
        lengths = self._lengths
        # Most spans decode a token that is on the device. By index: names are twice as slow, and there are many.
        plain = [span for span in plan.spans if span[3] == 1 and not span[5]]
        rows = [span[0] for span in plain]
        context = max([span[2] for span in plain], default=0)
        chunks: list[tuple[int, int, int, bool]] = []
        drafts = [0] * len(rows)
        for span in plan.spans if len(plain) < len(plan.spans) else ():
            id, start, length, draft = span.request, span.start, span.length, span.draft
            if length == 1 and not span.tokens:
                continue
            if length == 1 + draft and start >= lengths.get(id, 0):
                rows.append(id)
                drafts.append(draft)
                context = max(context, start)
            else:
                chunks.append((id, start, length, span.samples))
        end = result.at if stopped else result.finished
        drafted = array("i", drafts).tobytes() if any(drafts) else b""
        step = Step(name, result.started, end, stopped, tuple(chunks), array("i", rows).tobytes(), drafted, context)
        self._steps.append(step)
        self._rows += len(rows)
        while len(self._steps) > STEPS or self._rows > ROWS:
            self._rows -= len(self._steps.popleft().rows) // 4

    def finished(self, request: Request, predicted: float | None) -> None:
        """Record the end of a request."""
        if self._running.pop(request.id, None) is None:
            return  # no instance had it
        self._number += 1
        life = replace(_life(request, predicted), ended=self._now())
        self._ended[request.id] = life, _line(self._number, request, life)
        self._tokens += len(life.token_times)
        while len(self._ended) > REQUESTS or (self._tokens > TOKENS and len(self._ended) > 1):
            oldest = next(iter(self._ended))
            self._tokens -= len(self._ended.pop(oldest)[0].token_times)
            self._places.pop(oldest, None)
            self._demoted.pop(oldest, None)

    def recent(self, since: int) -> Recent:
        """Return what has happened since; everything if `since` is of another start."""
        now, since = self._now(), since if since <= self._number else 0
        events = [event._replace(ago=now - at) for at, event in _after(self._events, since)]
        lines = []
        for life, line in reversed(self._ended.values()):
            if line.number <= since:
                break
            at = _end_of(life)
            lines.append(line._replace(ago=now - at))
        return Recent(self._number, tuple(events), tuple(reversed(lines)))

    def life(self, id: int, client: str | None = None) -> RequestLife | None:
        """Return what is known of a request; None if it is unknown, or not of this client. client: None: any."""
        if id in self._running:
            life = _life(self._running[id], None)
        elif id in self._ended:
            life = self._ended[id][0]
        else:
            return None
        if client is not None and life.client != client:
            return None
        return self._with_steps(life, client)

    def _with_steps(self, life: RequestLife, client: str | None) -> RequestLife:
        """Add the steps of the request's instances while it was there."""
        end = _end_of(life)
        placed, moves = self._places[life.id]
        names = {*(event.instance for event in placed), *(event.target for event in moves)}
        steps = tuple(
            step for step in self._steps if step.instance in names and step.end > life.arrival and step.start < end
        )
        lengths = dict(self._lengths)  # the engine's thread has no time to look which of them are in the steps
        others = () if client is None else tuple(id for id in lengths if self._clients[id] != client)
        demoted = self._demoted.get(life.id)
        return replace(
            life, steps=steps, placed=tuple(placed), moves=tuple(moves), lengths=lengths, others=others, demoted=demoted
        )


def _life(request: Request, predicted: float | None) -> RequestLife:
    return RequestLife(
        request.id,
        request.key,
        request.asked.client,
        request.class_,
        request.tier,
        request.slo,
        request.arrival,
        request.prompt_length,
        request.cached,
        request.drops,
        tuple(request.token_times),
        request.first_token_at,
        request.finish_reason,
        request.error,
        stage_allowance(request),
        predicted,
    )


def _end_of(life: RequestLife) -> float:
    """Return when a request ended: with its last token if it has one; inf while it runs."""
    if life.ended is None:
        return inf
    return life.token_times[-1] if life.token_times else life.ended


def _after(events: deque[tuple[float, Event]], since: int) -> Iterator[tuple[float, Event]]:
    newer = []
    for at, event in reversed(events):
        if event.number <= since:
            break
        newer.append((at, event))
    return reversed(newer)


def _line(number: int, request: Request, life: RequestLife) -> EndedRequest:
    measured = measure(request, allowance=life.allowance)
    return EndedRequest(
        number,
        0.0,
        request.id,
        request.key,
        life.client,
        request.class_,
        request.tier,
        measured.prompt,
        measured.output,
        inf if request.scheduled_at is None else request.scheduled_at - request.arrival,
        measured.ttft,
        measured.tpot,
        request.slo.ttft,
        request.slo.tpot,
        nan if life.predicted is None else life.predicted,
        measured.attained,
        request.finish_reason or "",
        measured.promised,
    )
