"""Starts and stops replicas with the load: the rules of sched/scaling on snapshots of the running engines.

It runs where the engines are started, so there is one, however many fronts there are. It sees what a
front sees, and the arrivals that the engines count for all fronts.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import threading
import time
from contextlib import suppress

from jaxserve.config import ServeConfig, parse_mesh
from jaxserve.fleet.board import Board, ScaleState
from jaxserve.fleet.replicas import Replicas
from jaxserve.fleet.rolling import CLAIM
from jaxserve.fleet.supervisor import Engines
from jaxserve.sched import scaling
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.scaling.base import Arriving, Target
from jaxserve.sched.scaling.changes import Standing, changes

log = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between decisions


class ReplicaScaler:
    """Decides how many engines run. Writer: its thread, between `start` and `close`."""

    def __init__(self, engines: Engines, config: ServeConfig, period: float = PERIOD) -> None:
        assert config.max_replicas is not None
        self._engines = engines
        self._config = config
        self._period = period
        self._least, self._most = config.min_replicas or 1, config.max_replicas
        self._scaler = scaling.make(config.scaling)
        self._target = Target(self._least, self._most, config.downscale_delay)
        self._each = 1 if config.mesh is None else parse_mesh(config.mesh)[0]  # instances of a replica
        self._fixed: int | None = None
        folder = engines.places[0].address.folder
        assert folder is not None
        self.board = Board(folder)
        self._folder = folder
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="jaxserve-scaler", daemon=True)

    def start(self) -> None:
        """Begin to decide. The first engines must be ready."""
        self._publish(self._engines.begin)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    async def _run(self) -> None:
        replicas: Replicas | None = None
        while not self._ending.is_set():
            try:
                if replicas is None:
                    replicas = await Replicas.connect(self._engines.places, partly=True)
                self._decide(replicas, time.monotonic())
            except InvalidValue as error:
                log.debug("no replica can be seen: %s", error)
            except Exception:
                log.exception("the number of replicas stays as it is")
            await asyncio.sleep(self._period)
        if replicas is not None:
            replicas.close()

    def _decide(self, replicas: Replicas, now: float) -> None:
        keepers = self._engines.keepers
        standing = [keeper.standing for keeper in keepers]
        wanted = self._needed(replicas, now, standing)
        planned = changes(wanted, standing, [self._requests(replicas, at) for at in range(len(keepers))])
        serving, restarting = standing.count(Standing.SERVING), self._restarting
        drain = [] if restarting else planned.drain
        for at in (*planned.start, *planned.resume):
            keepers[at].want(True)
        for at in planned.resume:
            if at in replicas.engines:
                replicas.engines[at].stay()
        for at in drain:
            keepers[at].want(False)
        for at, state in enumerate(standing):
            if state is Standing.STARTING and serving >= wanted and not restarting:
                keepers[at].want(False)
        self._retire(replicas)
        if planned.start or planned.resume or drain:
            said = {"starts": planned.start, "serves on": planned.resume, "drains": drain}
            log.info("%d replicas are wanted: %s", wanted, "; ".join(f"{at} {do}" for do, at in said.items() if at))
        self._publish(wanted)

    def _needed(self, replicas: Replicas, now: float, standing: list[Standing]) -> int:
        asked = self.board.asked()
        if asked is not None:
            self._fixed = asked.replicas
        # A replica that takes long to start is worth keeping for as long.
        self._target.hold = max(self._config.downscale_delay, self._startup)
        fleet = replicas.members.fleet(now)
        arriving = Arriving.total([engine.arriving for engine in replicas.engines.values() if not engine.lost])
        if fleet.instances:
            needed = self._scaler.needed(fleet, arriving) / self._each
        else:
            needed = float(sum(state in (Standing.SERVING, Standing.STARTING) for state in standing))
        target = self._target.at(now, needed)
        return target if self._fixed is None else min(self._most, max(self._least, self._fixed))

    def _retire(self, replicas: Replicas) -> None:
        """Let engines that are not wanted finish their requests and end."""
        for at, engine in replicas.engines.items():
            if not self._engines.keepers[at].wanted and not engine.leaving and not engine.lost:
                engine.restart(self._config.drain_timeout)

    def _requests(self, replicas: Replicas, at: int) -> int:
        engine = replicas.engines.get(at)
        return 0 if engine is None else engine.stats().running + engine.stats().waiting

    @property
    def _startup(self) -> float:
        return max(keeper.startup for keeper in self._engines.keepers)

    @property
    def _restarting(self) -> bool:
        """Whether a front restarts all replicas: none may leave meanwhile."""
        with suppress(FileNotFoundError), (self._folder / CLAIM).open("rb") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _publish(self, wanted: int) -> None:
        keepers = self._engines.keepers
        failures = [keeper.failure for keeper in keepers if keeper.failure is not None and keeper.wanted]
        standing = tuple(keeper.standing.value for keeper in keepers)
        failure = failures[0] if failures else None
        self.board.publish(ScaleState(self._least, self._most, wanted, self._fixed, standing, self._startup, failure))
