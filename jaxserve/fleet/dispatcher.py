"""Sends requests to engines, and continues elsewhere what a lost engine leaves behind or a prefill replica hands over.

No schedule changes a request's tokens, so a request whose engine is lost continues on another one
from its prompt and the tokens that have arrived, with the very tokens that it would have had. This
needs its seed, which is therefore chosen here and not by an engine.
"""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from jaxserve.fleet.handoff import short, splits, unfit
from jaxserve.fleet.members import Members
from jaxserve.fleet.remote_engine import REMEMBERED
from jaxserve.fleet.routed_request import RoutedRequest, Stage
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.errors import JaxserveError, QueueFull, Unavailable
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.plan import UNAVAILABLE, Delta

log = logging.getLogger(__name__)

MOVES = 8  # replicas that a request may try before it ends with an error: it may be what ends them


class Dispatcher:
    """The requests of one front. Writer: the loop of its Replicas."""

    def __init__(self, members: Members, seed: str) -> None:
        """seed: from which those of requests without one come."""
        self._members, self._seed = members, seed
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
            raise Unavailable(self._members.ailment or "no replica takes requests")
        self.requests[id] = request
        self._send(request, instance)
        return id

    def cancel(self, id: int, reason: str) -> None:
        """End a request early; no effect if it has ended."""
        request = self.requests.get(id)
        if request is not None and request.engine is not None:
            request.cancelled = reason
            request.engine.cancel(request.remote, reason)

    def record(self, id: int) -> RequestMetrics | None:
        """Return the times of a finished request, once."""
        request = self._over.pop(id, None)
        return None if request is None else request.metrics

    def refusal(self, id: int) -> JaxserveError | None:
        """Return why a request was not accepted; None if it was."""
        request = self._over.get(id)
        return None if request is None else request.refusal

    # where it goes

    def _instance(self, request: RoutedRequest) -> int | None:
        """Return an instance with the role to begin or continue a request; one with another role if there is none."""
        members = self._members
        if request.target is not None and request.output and self._takes(request, members.front.group(request.target)):
            return request.target
        begun = bool(request.output) or short(request.asked, members.like)
        others = unfit(members.engines, begun=begun)
        instance = self._choose(request, others)
        return self._choose(request) if instance is None and others else instance

    def _choose(self, request: RoutedRequest, others: Collection[int] = ()) -> int | None:
        """Return the instance that the router chooses, among those of replicas that take the request but `others`."""
        without = [at for at in range(self._members.slots) if at in others or not self._takes(request, at)]
        return self._members.front.choose(request.seen, time.monotonic(), without)

    def _takes(self, request: RoutedRequest, replica: int) -> bool:
        return self._members.takes(replica, request.tried)

    def _send(self, request: RoutedRequest, instance: int) -> None:
        """Send a request to the engine of an instance. The engine may use another one of its own."""
        engine = self._members.engine(instance)
        request.stage = Stage.RUNNING
        if not request.output:
            self._plan(request, self._members.front.group(instance))
        request.send(engine, self._kv_of(request, instance), partial(self._receive, request))
        self._members.front.sent(instance, request.seen, request.remote)

    def _plan(self, request: RoutedRequest, replica: int) -> None:
        """Decide whether a replica hands a request over, and let the one that continues it fetch the KV meanwhile."""
        members = self._members
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
        members = self._members
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
                end = Delta(request.id, finish_reason=UNAVAILABLE, error=self._members.ailment)
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
                self._members.engine(instance).name,
                len(request.output),
                end.error,
            )
        return instance
