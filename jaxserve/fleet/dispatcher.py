"""Sends requests to engines, and continues elsewhere what a lost engine leaves behind or a prefill replica hands over.

No schedule changes a request's tokens, so a request whose engine is lost continues on another one
from its prompt and the tokens that have arrived, with the very tokens that it would have had. This
needs its seed, which is therefore chosen here and not by an engine.

With prefill and decode replicas a request gets its first token on one, and continues on another. The
replica that decodes fetches the KV of the prompt from the one that prefills, page by page while they
are computed. If nothing arrives, it computes the prompt: which replicas there are, and what they have,
changes the time of a token and not the token. Every replica can do both.
"""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

from jaxserve.fleet.members import Members
from jaxserve.fleet.remote_engine import REMEMBERED, RemoteEngine
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.errors import JaxserveError, QueueFull, Unavailable
from jaxserve.sched.api.new_request import NewRequest, Progress
from jaxserve.sched.api.plan import UNAVAILABLE, Delta
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request

log = logging.getLogger(__name__)

MOVES = 8  # replicas that a request may try before it ends with an error: it may be what ends them


class Stage(Enum):
    """Where a request is. It may go back from any stage but the last to another engine, if its own is lost or full."""

    QUEUED = "queued"  # at no engine
    FIRST = "first"  # at one that computes its first token, and then hands it over
    RUNNING = "running"  # at one that computes all of it, or all that is left
    OVER = "over"


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """Writer: its Dispatcher."""

    id: int  # here
    asked: NewRequest  # with a seed
    arrival: float  # seconds, of time.monotonic
    on_delta: Callable[[Delta], None]
    stage: Stage = Stage.QUEUED
    seen: Request = field(init=False)  # what the router sees
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when they arrived
    scored: int = 0  # prompt positions with log-probabilities
    engine: RemoteEngine | None = None
    remote: int = -1  # its id there
    tried: list[RemoteEngine] = field(default_factory=list)  # engines that were lost with it, or had no room
    target: int | None = None  # the instance that continues after the first token
    kv_from: str = ""  # where the KV of its prompt was computed
    cancelled: str | None = None
    metrics: RequestMetrics | None = None
    refusal: JaxserveError | None = None

    def __post_init__(self) -> None:
        self.seen = Request(self.id, self.asked, self.arrival)
        self.seen.output = self.output
        before = self.asked.progress
        if before is not None:
            now = time.monotonic()
            self.output += before.output
            self.scored = before.scored
            self.times = [now - before.first, now - before.last] if before.output else []

    def send(self, engine: RemoteEngine, kv: tuple[str, int], told: Callable[[Delta], None]) -> None:
        """Send it to an engine, with its progress so far. kv: where pages are, and of how many tokens."""
        now, kv_from, kv_tokens = time.monotonic(), *kv
        request = replace(
            self.asked, waited=now - self.arrival, progress=self._progress(now), kv_from=kv_from, kv_tokens=kv_tokens,
            handed_over=self.stage is Stage.FIRST,
        )  # fmt: skip
        self.engine, self.remote = engine, engine.submit(request, told)

    def _progress(self, now: float) -> Progress | None:
        """Return what the next engine must know; None for a request without a beginning."""
        if not self.output and not self.scored:
            return None
        first, last = (now - self.times[0], now - self.times[-1]) if self.times else (0.0, 0.0)
        return Progress(tuple(self.output), first, last, self.scored)

    def receive(self, delta: Delta) -> None:
        """Keep what an engine says of it."""
        if delta.tokens:
            self.output += delta.tokens
            self.times.append(time.monotonic())
        self.scored += len(delta.prompt_logprobs)
        if delta.finish_reason is not None and self.engine is not None:
            self.metrics, self.refusal = self.engine.record(self.remote), self.engine.refusal(self.remote)

    def pass_on(self, delta: Delta) -> None:
        """Tell what asked for it."""
        self.on_delta(delta._replace(request=self.id))


class Dispatcher:
    """The requests of one front. Writer: the loop of its Replicas."""

    def __init__(self, members: Members, seed: str) -> None:
        """seed: from which those of requests without one come."""
        self.members, self._seed = members, seed
        self._ids = itertools.count()
        self.requests: dict[int, RoutedRequest] = {}  # that are not over
        self._over: OrderedDict[int, RoutedRequest] = OrderedDict()  # not read with `record` or `refusal` yet
        self.on_continued: Callable[[], None] = lambda: None  # told when a request goes on after a loss

    def submit(self, asked: NewRequest, on_delta: Callable[[Delta], None]) -> int:
        """Send a request to an engine, and return its id. Raises Unavailable if none can take it."""
        id, params = next(self._ids), asked.params
        if params.seed is None:
            params = params.of_output(zlib.crc32(f"{self._seed} {id}".encode()), params.prompt_logprobs)
        request = RoutedRequest(id, replace(asked, params=params), time.monotonic() - asked.waited, on_delta)
        instance = self._instance(request)
        if instance is None:
            raise Unavailable(self.members.ailment or "no replica takes requests")
        self.requests[id] = request
        self._send(request, instance)
        return id

    def cancel(self, id: int, reason: str = "abort") -> None:
        request = self.requests.get(id)
        if request is not None and request.engine is not None:
            request.cancelled = reason
            request.engine.cancel(request.remote, reason)

    def record(self, id: int) -> RequestMetrics | None:
        request = self._over.pop(id, None)
        return None if request is None else request.metrics

    def refusal(self, id: int) -> JaxserveError | None:
        """Return why a request was not accepted; None if it was."""
        request = self._over.get(id)
        return None if request is None else request.refusal

    # where it goes

    def _instance(self, request: RoutedRequest) -> int | None:
        """Return an instance with the role to begin or continue a request; one with another role if there is none."""
        members = self.members
        if request.target is not None and request.output and self._takes(request, members.front.group(request.target)):
            return request.target
        begun = bool(request.output) or short(request.asked, members.like)
        others = unfit(members.engines, begun=begun)
        instance = self._choose(request, others)
        return self._choose(request) if instance is None and others else instance

    def _choose(self, request: RoutedRequest, others: Collection[int] = ()) -> int | None:
        """Return the instance that the router chooses, among those of replicas that take the request but `others`."""
        without = [at for at in range(self.members.slots) if at in others or not self._takes(request, at)]
        return self.members.front.choose(request.seen, time.monotonic(), without)

    def _takes(self, request: RoutedRequest, replica: int) -> bool:
        return self.members.takes(replica, request.tried)

    def _send(self, request: RoutedRequest, instance: int) -> None:
        """Send a request to the engine of an instance. The engine may use another one of its own."""
        engine = self.members.engine(instance)
        request.stage = Stage.RUNNING
        if not request.output:
            self._plan(request, self.members.front.group(instance))
        request.send(engine, self._kv_of(request, instance), partial(self._receive, request))
        self.members.front.sent(instance, request.seen, request.remote)

    def _plan(self, request: RoutedRequest, replica: int) -> None:
        """Decide whether a replica hands a request over, and let the one that continues it fetch the KV meanwhile."""
        members = self.members
        kv = request.kv_from = members.engines[replica].kv
        request.target = None
        if not kv:
            return
        taking = {at: engine for at, engine in members.engines.items() if self._takes(request, at)}
        if not splits(request.asked, taking, replica):
            return
        request.stage = Stage.FIRST
        request.target = self._choose(request, unfit(members.engines, begun=True))
        if request.target is not None:
            members.engine(request.target).prefetch(request.asked.prompt, request.asked.salt, kv)

    def _kv_of(self, request: RoutedRequest, instance: int) -> tuple[str, int]:
        """Return where the engine of an instance can fetch KV, and of how many tokens (0: of the whole prompt).

        For a request that has begun that is where its prompt was computed, and else another replica that has
        more of its prefix.
        """
        members = self.members
        engine = members.engine(instance)
        if request.kv_from not in ("", engine.kv):
            return request.kv_from, 0
        longer = members.front.longer_hit(request.seen, instance) if engine.kv else None
        if longer is None:
            return "", 0
        holder = members.engines.get(members.front.group(longer[0]))
        return (holder.kv, longer[1]) if holder is not None and holder.healthy else ("", 0)

    # what comes back

    def _receive(self, request: RoutedRequest, delta: Delta) -> None:
        """Pass on what an engine says of a request, or continue it elsewhere if the engine is lost or hands it over."""
        request.receive(delta)
        if delta.finish_reason is not None:
            instance, delta = self._next(request, delta)
            if instance is not None:
                self._send(request, instance)
                return
            request.stage = Stage.OVER
            del self.requests[request.id]
            self._over[request.id] = request
            if len(self._over) > REMEMBERED:
                self._over.popitem(last=False)
        request.pass_on(delta)

    def _next(self, request: RoutedRequest, end: Delta) -> tuple[int | None, Delta]:
        """Return the instance on which a request continues after an engine's last delta; None if it is over with it."""
        if request.stage is Stage.FIRST and end.finish_reason == "length":
            request.pass_on(end._replace(finish_reason=None))  # it may be cancelled in here
            instance = None if request.cancelled is not None else self._instance(request)
            if instance is None:
                end = Delta(request.id, finish_reason=UNAVAILABLE, error=self.members.ailment)
        else:
            instance = self._elsewhere(request, end)
        if instance is None and end.finish_reason == UNAVAILABLE and request.cancelled is not None:
            end = Delta(request.id, finish_reason=request.cancelled)
        return instance, end

    def _elsewhere(self, request: RoutedRequest, end: Delta) -> int | None:
        """Return another instance for a request whose engine is lost, hangs, or has no room."""
        lost, full = end.finish_reason == UNAVAILABLE, isinstance(request.refusal, QueueFull | Unavailable)
        if request.cancelled is not None or request.engine is None or not (lost or full):
            return None
        request.tried.append(request.engine)
        instance = self._instance(request) if len(request.tried) <= MOVES else None
        if instance is not None:
            if lost:
                self.on_continued()
            log.info(
                "request %s continues on %s after %d tokens: %s",
                request.asked.key,
                self.members.engine(instance).name,
                len(request.output),
                end.error,
            )
        return instance


def unfit(engines: Mapping[int, RemoteEngine], begun: bool) -> set[int]:
    """Return the replicas whose role is not to begin requests, or to continue those that have begun."""
    other = Role.PREFILL if begun else Role.DECODE
    return {at for at, engine in engines.items() if engine.kv and all(role is other for role in engine.roles)}


def splits(request: NewRequest, engines: Mapping[int, RemoteEngine], replica: int) -> bool:
    """Return whether a replica is to compute only the first token of a request, because others decode.

    engines: those that take the request. Requests for log-probabilities of the prompt stay, since
    whatever continues them computes the whole prompt.
    """
    engine = engines[replica]
    if not engine.kv or short(request, engine) or request.params.whole_prompt:
        return False
    info = engine.info
    most = min(request.params.max_tokens or info.max_model_len, info.max_model_len - len(request.prompt))
    prefilling = unfit(engines, begun=True)
    return most > 1 and replica in prefilling and len(prefilling) < len(engines)


def short(request: NewRequest, engine: RemoteEngine) -> bool:
    """Return whether a prompt has no whole page, so that there is nothing to hand over."""
    return len(request.prompt) < engine.info.instances[0].page_size
