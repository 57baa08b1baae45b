"""The engines of several replicas as they come and go: which there are, what is known of them, which take requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from jaxserve.engine.runtime.info import EngineInfo, Stats
from jaxserve.engine.runtime.merged import merged_info, merged_stats, totals
from jaxserve.fleet.remote_engine import RemoteEngine
from jaxserve.fleet.reports import Update
from jaxserve.sched import routing
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.routing.base import Fleet
from jaxserve.sched.routing.front import Front
from jaxserve.wire.address import Place

log = logging.getLogger(__name__)

RETRY = 0.25  # seconds between attempts to connect to an engine that was lost


class Members:
    """The engines by the numbers of their replicas. Writer: the loop of its Replicas."""

    def __init__(self, engines: Sequence[RemoteEngine | None], router: str, fronts: int, seed: int) -> None:
        """Use connected engines; None: one that may `join` later. router, fronts, seed: see `Front`.

        Raises InvalidValue if the engines do not serve the same model in the same way, or there is none.
        """
        self.engines = {at: engine for at, engine in enumerate(engines) if engine is not None}  # some may be lost
        if not self.engines:
            raise InvalidValue("no replica runs", "replicas")
        self.like = next(iter(self.engines.values()))  # the others are like it; it may have left
        self.slots = len(engines)
        self.info: EngineInfo  # of the engines that are here; set by _changed
        self.on_changed: Callable[[], None] = lambda: None  # told when an engine has joined or left
        self._changed()
        counts = [len((self.engines.get(at) or self.like).info.instances) for at in range(self.slots)]
        page_size = self.like.info.instances[0].page_size
        self.front = Front(routing.make(router), counts, page_size, fronts=fronts, seed=seed)
        for at, engine in self.engines.items():
            self._follow(at, engine)
        self.draining = set[int]()  # replicas that get no more requests
        self.folder: Path | None = None  # that all fronts of this machine have in common
        self._ended: tuple[Stats, ...] = ()  # the sum of what engines that have ended had counted, if there are any
        self._watching = set[asyncio.Task[None]]()  # connections to replicas without an engine
        self._closed = False

    # engines that come back

    def watch(self, at: int, place: Place) -> None:
        """Connect to a replica again whenever its engine is lost, or now if it has none."""

        def lost(why: str) -> None:
            if self._closed:
                return
            if engine is not None and engine.leaving:
                log.info("%s has left", place.name)
                self.leave(at)
            else:
                log.error("%s is lost: %s", place.name, why)
            self._reconnect(at, place)

        engine = self.engines.get(at)
        if engine is not None:
            engine.on_lost = lost
        else:
            self._reconnect(at, place)

    def _reconnect(self, at: int, place: Place) -> None:
        task = asyncio.ensure_future(self._connect(at, place))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _connect(self, at: int, place: Place) -> None:
        while True:
            await asyncio.sleep(RETRY)
            try:
                self.join(at, await RemoteEngine.connect(*place))
            except InvalidValue as error:
                log.debug("%s is not there: %s", place.name, error)
            else:
                self.watch(at, place)
                log.info("%s is there", place.name)
                return

    def join(self, replica: int, engine: RemoteEngine) -> None:
        """Use an engine for a replica from now on. Raises InvalidValue if it differs from the others."""
        merged_info({-1: self.like.info, replica: engine.info})
        count, own = len(self.front.instances(replica)), len(engine.info.instances)
        if own != count:
            raise InvalidValue(f"the replica has {own} instances, and each of the others has {count}", "mesh")
        self._retain(replica)
        self.engines[replica] = self.like = engine
        self.engines = dict(sorted(self.engines.items()))
        self._follow(replica, engine)
        self.draining.discard(replica)
        self._changed()

    def leave(self, replica: int) -> None:
        """Forget the engine of a replica, which has ended as it should."""
        self._retain(replica)
        del self.engines[replica]
        self.front.forget(replica)
        self.draining.discard(replica)
        self._changed()

    def _retain(self, replica: int) -> None:
        """Keep what the last engine of a replica has counted."""
        engine = self.engines.get(replica)
        if engine is not None:
            self._ended = (merged_stats({}, [*self._ended, totals(engine.stats())], alone=True),)

    def _changed(self) -> None:
        if self.engines:
            self.info = merged_info({at: engine.info for at, engine in self.engines.items()}, alone=self.slots == 1)
        self.on_changed()

    def close(self) -> bool:
        self._closed = True
        for task in self._watching:
            task.cancel()
        closed = [engine.close() for engine in self.engines.values()]
        return all(closed)

    # what the router knows

    def _follow(self, at: int, engine: RemoteEngine) -> None:
        """Let the router know the instances of an engine."""
        self.front.forget(at)
        self._report(at, engine, engine.updates, -1)
        if self.slots > 1:
            engine.follow(partial(self._report, at, engine))

    def _report(self, at: int, engine: RemoteEngine, updates: Mapping[int, Update], mark: int) -> None:
        if self.engines.get(at) is not engine:
            return
        first = self.front.instances(at).start
        for index, update in updates.items():
            self.front.caches(first + index, update.gained, update.lost, update.anew)
        self.front.update(at, {first + index: update.snapshot for index, update in updates.items()}, mark)

    def fleet(self, now: float) -> Fleet:
        """Return the instances of all replicas that take requests, as a router sees them."""
        instances = [
            self.front.instance(index)
            for at, engine in self.engines.items()
            if engine.healthy and at not in self.draining
            for index in self.front.instances(at)
        ]
        return Fleet(now, [instance for instance in instances if instance is not None], lambda tokens: 0.0)

    # which take requests

    def engine(self, instance: int) -> RemoteEngine:
        return self.engines[self.front.group(instance)]

    def takes(self, replica: int, but: Collection[RemoteEngine]) -> bool:
        """Return whether a replica takes requests, and its engine is none of `but`."""
        engine = self.engines.get(replica)
        if engine is None or replica in self.draining or engine in but:
            return False
        return engine.healthy and not engine.crowded

    def drain(self, replica: int) -> None:
        """Send no more requests to a replica; running ones finish there."""
        self.draining.add(replica)

    @property
    def ailment(self) -> str | None:
        """Why no engine takes requests; None if one does."""
        ailments = [engine.ailment for at, engine in self.engines.items() if at not in self.draining]
        if None in ailments:
            return None
        return "; ".join(dict.fromkeys(filter(None, ailments))) or "all replicas are draining"

    async def renew(self, replica: int, patience: float) -> None:
        """Let a replica finish its requests, up to `patience` seconds, and start again; return once it is back.

        Waits first until all others that run take requests. Returns at once if the replica does not run.
        """
        while not all(engine.healthy for at, engine in self.engines.items() if at != replica):
            await asyncio.sleep(RETRY)
        before = self.engines.get(replica)
        if before is None:
            return
        self.drain(replica)
        before.restart(patience)
        while (engine := self.engines.get(replica)) is before or engine is None or not engine.healthy:
            await asyncio.sleep(RETRY)

    # what they say

    def stats(self) -> Stats:
        """Return the sum of the engines' last snapshots, and of what those that have ended had counted."""
        return merged_stats({at: engine.stats() for at, engine in self.engines.items()}, self._ended, self.slots == 1)

    def standing(self) -> list[tuple[str, str | None, int]]:
        """Return the name of each replica that runs, why it takes no requests, or None, and its requests."""
        return [
            (
                engine.name,
                "draining" if at in self.draining and engine.healthy else engine.ailment,
                engine.stats().running + engine.stats().waiting,
            )
            for at, engine in self.engines.items()
        ]
