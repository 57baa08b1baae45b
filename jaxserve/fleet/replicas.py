"""Several engines of the same model, used as one: routing, and continuation of what a lost engine leaves behind.

No schedule changes a request's tokens, so a request whose engine is lost continues on another one
from its prompt and the tokens that have arrived, with the very tokens that it would have had. This
needs its seed, which is therefore chosen here and not by an engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from jaxserve.engine.runtime.info import EngineInfo, Stats
from jaxserve.engine.runtime.merged import merged_info, merged_stats, totals
from jaxserve.fleet.board import Board
from jaxserve.fleet.handoff import check_replica_roles, short, splits, unfit
from jaxserve.fleet.remote_engine import REMEMBERED, RemoteEngine
from jaxserve.fleet.reports import Update
from jaxserve.outputs import RequestMetrics
from jaxserve.sched import routing
from jaxserve.sched.api.errors import InvalidValue, JaxserveError, QueueFull, Unavailable
from jaxserve.sched.api.new_request import NewRequest, Progress
from jaxserve.sched.api.plan import UNAVAILABLE, Delta
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.routing.base import Fleet
from jaxserve.sched.routing.front import Front
from jaxserve.wire.address import Place

log = logging.getLogger(__name__)

ROUTER = "unified"
RETRY = 0.25  # seconds between attempts to connect to an engine that was lost
MOVES = 8  # replicas that a request may try before it ends with an error: it may be what ends them


@dataclass(slots=True, eq=False)
class _Ask:
    """A request and what has arrived for it. Writer: its Replicas."""

    id: int  # here
    request: NewRequest
    arrival: float  # seconds, of time.monotonic
    on_delta: Callable[[Delta], None]
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when they arrived
    scored: int = 0  # prompt positions with log-probabilities
    routed: Request = field(init=False)  # what the router sees
    engine: RemoteEngine | None = None
    remote: int = -1  # its id there
    tried: list[RemoteEngine] = field(default_factory=list)  # engines that were lost with it, or had no room
    split: bool = False  # `engine` computes the first token only
    target: int | None = None  # the instance that continues then
    kv_from: str = ""  # where the KV of its prompt was computed
    cancelled: str | None = None
    metrics: RequestMetrics | None = None
    refusal: JaxserveError | None = None

    def __post_init__(self) -> None:
        self.routed = Request(self.id, self.request, self.arrival)
        self.routed.output = self.output

    def progress(self, now: float) -> Progress | None:
        """Return what the next engine must know; None for a request without a beginning."""
        if not self.output and not self.scored:
            return None
        first, last = (now - self.times[0], now - self.times[-1]) if self.times else (0.0, 0.0)
        return Progress(tuple(self.output), first, last, self.scored)


class Replicas:
    """Engines in other processes as one engine. All methods belong to one loop, as those of RemoteEngine."""

    def __init__(
        self,
        engines: Sequence[RemoteEngine | None],
        seed: str = "0",
        router: str = ROUTER,
        fronts: int = 1,
    ) -> None:
        """Use connected engines, by the numbers of their replicas; None: one that may `join` later.

        The seeds of requests without one come from `seed`. `router`: by name. Raises InvalidValue if the engines do
        not serve the same model in the same way, or there is none.
        """
        self._engines = {at: engine for at, engine in enumerate(engines) if engine is not None}
        if not self._engines:
            raise InvalidValue("no replica runs", "replicas")
        self._like = next(iter(self._engines.values()))  # the others are like it; it may have left
        self._slots = len(engines)
        self.info: EngineInfo  # of the engines that are here; set by _changed
        self.on_changed: Callable[[], None] = lambda: None  # told when an engine has joined or left
        self._changed()
        counts = [len((self._engines.get(at) or self._like).info.instances) for at in range(self._slots)]
        page_size, drawn = self._like.info.instances[0].page_size, zlib.crc32(seed.encode())
        self._front = Front(routing.make(router), counts, page_size, fronts=fronts, seed=drawn)
        for at, engine in self._engines.items():
            self._follow(at, engine)
        self._seed = seed
        self._ids = itertools.count()
        self._asks: dict[int, _Ask] = {}  # unfinished
        self._over: OrderedDict[int, _Ask] = OrderedDict()  # ended, and not read with `record` or `refusal` yet
        self._ended: tuple[Stats, ...] = ()  # the sum of what engines that have ended had counted, if there are any
        self._draining = set[int]()
        self._watching = set[asyncio.Task[None]]()  # connections to replicas without an engine
        self._closed = False
        self.folder: Path | None = None  # that all fronts of this machine have in common
        self.on_continued: Callable[[], None] = lambda: None  # told when a request goes on after a loss

    @classmethod
    async def connect(
        cls,
        places: Sequence[Place],
        seed: str = "0",
        router: str = ROUTER,
        fronts: int = 1,
        *,
        partly: bool = False,
    ) -> Replicas:
        """Connect to engines that are ready, and to each that comes, or comes back, later.

        partly: some may not run yet, but one must. Raises InvalidValue if one does not answer, or differs from the
        others.
        """
        found = [await _connected(place) if partly else await RemoteEngine.connect(*place) for place in places]
        replicas = cls(found, seed, router, fronts)
        replicas.folder = places[0].address.folder
        for at, place in enumerate(places):
            replicas._watch(at, place)
        return replicas

    def _watch(self, at: int, place: Place) -> None:
        """Connect to a replica again whenever its engine is lost, or now if it has none."""

        def lost(why: str) -> None:
            if self._closed:
                return
            if engine is not None and engine.leaving:
                log.info("%s has left", place.name)
                self.leave(at)
            else:
                log.error("%s is lost: %s", place.name, why)
            self._await(at, place)

        engine = self._engines.get(at)
        if engine is not None:
            engine.on_lost = lost
        else:
            self._await(at, place)

    def _await(self, at: int, place: Place) -> None:
        task = asyncio.ensure_future(self._connect(at, place))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def _follow(self, at: int, engine: RemoteEngine) -> None:
        """Let the router know the instances of an engine."""
        self._front.forget(at)
        self._report(at, engine, engine.updates, -1)
        if self._slots > 1:
            engine.follow(partial(self._report, at, engine))

    def _report(self, at: int, engine: RemoteEngine, updates: Mapping[int, Update], mark: int) -> None:
        if self._engines.get(at) is not engine:
            return
        first = self._front.instances(at).start
        for index, one in updates.items():
            self._front.caches(first + index, one.gained, one.lost, one.anew)
        self._front.update(at, {first + index: one.snapshot for index, one in updates.items()}, mark)

    async def _connect(self, at: int, place: Place) -> None:
        while True:
            await asyncio.sleep(RETRY)
            try:
                self.join(at, await RemoteEngine.connect(*place))
            except InvalidValue as error:
                log.debug("%s is not there: %s", place.name, error)
            else:
                self._watch(at, place)
                log.info("%s is there", place.name)
                return

    # replicas that join and leave

    def join(self, replica: int, engine: RemoteEngine) -> None:
        """Use an engine for a replica from now on. Raises InvalidValue if it differs from the others."""
        merged_info({-1: self._like.info, replica: engine.info})
        count, own = len(self._front.instances(replica)), len(engine.info.instances)
        if own != count:
            raise InvalidValue(f"the replica has {own} instances, and each of the others has {count}", "mesh")
        self._retain(replica)
        self._engines[replica] = self._like = engine
        self._engines = dict(sorted(self._engines.items()))
        self._follow(replica, engine)
        self._draining.discard(replica)
        self._changed()

    def leave(self, replica: int) -> None:
        """Forget the engine of a replica, which has ended as it should."""
        self._retain(replica)
        del self._engines[replica]
        self._front.forget(replica)
        self._draining.discard(replica)
        self._changed()

    def _retain(self, replica: int) -> None:
        """Keep what the last engine of a replica has counted."""
        engine = self._engines.get(replica)
        if engine is not None:
            self._ended = (merged_stats({}, [*self._ended, totals(engine.stats())], alone=True),)

    def _changed(self) -> None:
        if self._engines:
            self.info = merged_info({at: one.info for at, one in self._engines.items()}, alone=self._slots == 1)
        self.on_changed()

    @property
    def engines(self) -> Mapping[int, RemoteEngine]:
        """The engine of each replica that has one; it may be lost."""
        return self._engines

    def fleet(self, now: float) -> Fleet:
        """Return the instances of all replicas that take requests, as a router sees them."""
        instances = [
            self._front.instance(index)
            for at, engine in self._engines.items()
            if engine.healthy and at not in self._draining
            for index in self._front.instances(at)
        ]
        return Fleet(now, [one for one in instances if one is not None], lambda tokens: 0.0)

    # requests

    def submit(self, request: NewRequest, on_delta: Callable[[Delta], None]) -> int:
        """Submit a request, as to a `RemoteEngine`, and return its id. Raises Unavailable if no engine can take it."""
        id, now, params, progress = next(self._ids), time.monotonic(), request.params, request.progress
        if params.seed is None:
            params = replace(params, seed=zlib.crc32(f"{self._seed} {id}".encode()))
        ask = _Ask(id, replace(request, params=params), now - request.waited, on_delta)
        if progress is not None:
            ask.output += progress.output
            ask.scored = progress.scored
            ask.times = [now - progress.first, now - progress.last] if progress.output else []
        found = self._pick(ask)
        if found is None:
            raise Unavailable(self.ailment or "no replica takes requests")
        self._asks[id] = ask
        self._start(ask, found)
        return id

    def check_outputs(self, prompts: int, n: int) -> None:
        """Raise InvalidValue if the queues can never hold `n` outputs of each of `prompts` prompts."""
        self._like.check_outputs(prompts, n, sum(engine.entries for engine in self._engines.values()))

    def cancel(self, request: int, reason: str = "abort") -> None:
        """End a request early; no effect if it has ended."""
        ask = self._asks.get(request)
        if ask is not None and ask.engine is not None:
            ask.cancelled = reason
            ask.engine.cancel(ask.remote, reason)

    def record(self, request: int) -> RequestMetrics | None:
        """Return the times of a finished request, once."""
        ask = self._over.pop(request, None)
        return None if ask is None else ask.metrics

    def refusal(self, request: int) -> JaxserveError | None:
        """Return why a request was not accepted; None if it was."""
        ask = self._over.get(request)
        return None if ask is None else ask.refusal

    # routing

    def _choose(self, ask: _Ask, others: Collection[int] = ()) -> int | None:
        """Return the instance that the router chooses, among those of replicas that take the request but `others`."""
        without = [at for at in range(self._slots) if at in others or not self._takes(ask, at)]
        return self._front.choose(ask.routed, time.monotonic(), without)

    def _pick(self, ask: _Ask) -> int | None:
        """Return an instance with the role to begin or continue a request; one with another role if there is none."""
        if ask.target is not None and ask.output and self._takes(ask, self._front.group(ask.target)):
            return ask.target
        begun = bool(ask.output) or short(ask.request, self._like)
        others = unfit(self._engines, begun=begun)
        found = self._choose(ask, others)
        return self._choose(ask) if found is None and others else found

    def _takes(self, ask: _Ask, replica: int) -> bool:
        engine = self._engines.get(replica)
        return (
            engine is not None
            and engine.healthy
            and not engine.crowded
            and replica not in self._draining
            and engine not in ask.tried
        )

    def _start(self, ask: _Ask, instance: int) -> None:
        """Send a request to the engine of an instance. The engine may use another one of its own."""
        now, replica = time.monotonic(), self._front.group(instance)
        engine = self._engines[replica]
        if not ask.output:
            self._plan(ask, replica)
        handed_over = ask.split = ask.split and not ask.output
        kv_from, kv_tokens = self._kv_of(ask, instance)
        request = replace(
            ask.request, waited=now - ask.arrival, progress=ask.progress(now), handed_over=handed_over, kv_from=kv_from,
            kv_tokens=kv_tokens,
        )  # fmt: skip
        ask.engine, ask.remote = engine, engine.submit(request, partial(self._told, ask, engine))
        self._front.sent(instance, ask.routed, ask.remote)

    def _kv_of(self, ask: _Ask, instance: int) -> tuple[str, int]:
        """Return where the engine of an instance can fetch KV, and of how many tokens (0: of the whole prompt).

        For a request that has begun that is where its prompt was computed, and else another replica that has
        more of its prefix.
        """
        engine = self._engines[self._front.group(instance)]
        if ask.kv_from not in ("", engine.kv):
            return ask.kv_from, 0
        longer = self._front.longer_hit(ask.routed, instance) if engine.kv else None
        if longer is None:
            return "", 0
        holder = self._engines.get(self._front.group(longer[0]))
        return (holder.kv, longer[1]) if holder is not None and holder.healthy else ("", 0)

    def _plan(self, ask: _Ask, replica: int) -> None:
        """Decide whether a replica hands a request over, and let the one that continues it fetch the KV meanwhile."""
        kv = ask.kv_from = self._engines[replica].kv
        ask.target, ask.split = None, False
        if not kv:
            return
        others = {at: one for at, one in self._engines.items() if self._takes(ask, at)}
        ask.split = splits(ask.request, others, replica)
        if ask.split:
            ask.target = self._choose(ask, unfit(self._engines, begun=True))
        if ask.target is not None:
            there = self._engines[self._front.group(ask.target)]
            there.prefetch(ask.request.prompt, ask.request.salt, kv)

    def _told(self, ask: _Ask, engine: RemoteEngine, delta: Delta) -> None:
        """Pass on what an engine says of a request, or continue it elsewhere if the engine is lost."""
        if delta.tokens:
            ask.output += delta.tokens
            ask.times.append(time.monotonic())
        ask.scored += len(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            ask.metrics, ask.refusal = engine.record(ask.remote), engine.refusal(ask.remote)
            if self._continues(ask, engine, delta):
                return
            if ask.split and delta.finish_reason == "length":
                found = self._handed_over(ask, delta)
                if found is not None:
                    self._start(ask, found)
                    return
                delta = Delta(ask.id, finish_reason=UNAVAILABLE, error=self.ailment)
            if delta.finish_reason == UNAVAILABLE and ask.cancelled is not None:
                delta = Delta(ask.id, finish_reason=ask.cancelled)
            del self._asks[ask.id]
            self._over[ask.id] = ask
            if len(self._over) > REMEMBERED:
                self._over.popitem(last=False)
        ask.on_delta(delta._replace(request=ask.id))

    def _handed_over(self, ask: _Ask, delta: Delta) -> int | None:
        """Pass on the first token of a request that continues elsewhere, and return where."""
        ask.on_delta(delta._replace(request=ask.id, finish_reason=None))
        return None if ask.cancelled is not None else self._pick(ask)

    def _continues(self, ask: _Ask, engine: RemoteEngine, delta: Delta) -> bool:
        """Send a request to another engine if this one is lost, hangs, or has no room; return whether it was."""
        lost = delta.finish_reason == UNAVAILABLE
        full = isinstance(ask.refusal, QueueFull | Unavailable)
        if ask.cancelled is not None or not (lost or full):
            return False
        ask.tried.append(engine)
        found = self._pick(ask)
        if found is None or len(ask.tried) > MOVES:
            return False
        if lost:
            self.on_continued()
        log.info(
            "request %s continues on %s after %d tokens: %s",
            ask.request.key,
            self._engines[self._front.group(found)].name,
            len(ask.output),
            delta.error,
        )
        self._start(ask, found)
        return True

    # the engines as a whole

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of all instances."""
        return tuple(role for engine in self._engines.values() for role in engine.roles)

    @property
    def healthy(self) -> bool:
        """Whether at least one engine takes requests."""
        return self.ailment is None

    @property
    def ailment(self) -> str | None:
        """Why no engine takes requests; None if one does."""
        found = [engine.ailment for at, engine in self._engines.items() if at not in self._draining]
        if None in found:
            return None
        return "; ".join(dict.fromkeys(filter(None, found))) or "all replicas are draining"

    def stats(self) -> Stats:
        """Return the sum of the engines' last snapshots, and of what those that have ended had counted."""
        several = self._engines.values()
        stats = merged_stats({at: one.stats() for at, one in self._engines.items()}, self._ended, self._slots == 1)
        ready, draining = sum(one.healthy for one in several), sum(one.leaving and not one.lost for one in several)
        return replace(stats, replicas=ready, replicas_draining=draining, replicas_wanted=self._wanted())

    @property
    def board(self) -> Board | None:
        """Where the process that starts engines says how many there are; None: nowhere."""
        return None if self.folder is None else Board(self.folder)

    def _wanted(self) -> int:
        state = None if self.board is None else self.board.state()
        return self._slots if state is None else state.wanted

    async def refresh(self) -> None:
        """Fetch snapshots of now."""
        await asyncio.gather(*(engine.refresh() for engine in self._engines.values()))

    def set_roles(self, roles: Mapping[int, Role]) -> tuple[Role, ...]:
        """Set the roles of instances, as `Engine.set_roles`; called from another thread.

        Instances are numbered over all replicas. Replicas before one that refuses keep their new roles.
        """
        engines = tuple(self._engines.values())
        begin, unknown = 0, set(roles)
        for engine in engines:
            own = range(begin, begin + len(engine.roles))
            unknown -= set(own)
            begin = own.stop
        if unknown:
            raise InvalidValue(f"instance={min(unknown)!r} must be 0 to {begin - 1}", "instance")
        if any(engine.kv for engine in engines):
            check_replica_roles(roles.get(at, role) for at, role in enumerate(self.roles))
        begin = 0
        for engine in engines:
            count = len(engine.roles)
            if own_roles := {at - begin: role for at, role in roles.items() if begin <= at < begin + count}:
                engine.set_roles(own_roles)
            begin += count
        return self.roles

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches of all engines; False if one could not."""
        emptied = [engine.reset_prefix_cache() for engine in tuple(self._engines.values())]
        return all(emptied)

    def end_session(self, session: str) -> bool:
        """Let the pages of a session go in all engines; return whether one kept any."""
        kept = False
        for engine in tuple(self._engines.values()):
            with suppress(Unavailable):  # what is lost keeps nothing
                kept |= engine.end_session(session)
        return kept

    def profile(self, on: bool) -> bool:
        """Start or end traces of all engines. Raises the error of the first that fails, after asking all."""
        failures = []
        for engine in tuple(self._engines.values()):
            try:
                engine.profile(on)
            except JaxserveError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return True

    def close(self) -> bool:
        """Disconnect from all engines."""
        self._closed = True
        for task in self._watching:
            task.cancel()
        closed = [engine.close() for engine in self._engines.values()]
        return all(closed)

    def drain(self, replica: int) -> None:
        """Send no more requests to a replica; running ones finish there."""
        self._draining.add(replica)

    async def renew(self, replica: int, patience: float) -> None:
        """Let a replica finish its requests, up to `patience` seconds, and start again; return once it is back.

        Waits first until all others that run take requests. Returns at once if the replica does not run.
        """
        while not all(engine.healthy for at, engine in self._engines.items() if at != replica):
            await asyncio.sleep(RETRY)
        before = self._engines.get(replica)
        if before is None:
            return
        self.drain(replica)
        before.restart(patience)
        while (engine := self._engines.get(replica)) is before or engine is None or not engine.healthy:
            await asyncio.sleep(RETRY)

    def standing(self) -> list[tuple[str, str | None, int]]:
        """Return the name of each replica that runs, why it takes no requests, or None, and its requests."""
        return [
            (
                engine.name,
                "draining" if at in self._draining and engine.healthy else engine.ailment,
                engine.stats().running + engine.stats().waiting,
            )
            for at, engine in self._engines.items()
        ]


async def _connected(place: Place) -> RemoteEngine | None:
    try:
        return await RemoteEngine.connect(*place)
    except InvalidValue as error:
        log.debug("%s is not there: %s", place.name, error)
        return None
