"""The engines of a server, wherever they run: each is started again when it ends, as long as it is wanted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from jaxserve.config import ServeConfig
from jaxserve.errors import JaxserveError
from jaxserve.report.start import StartProgress, slowest
from jaxserve.sched.scaling.changes import Standing
from jaxserve.settings.kv_events import ranked
from jaxserve.wire.address import Place

log = logging.getLogger(__name__)

CLOSING = 15.0  # seconds in which an engine must close; then its process is killed
PAUSES = (0.0, 1.0, 10.0, 60.0)  # seconds before an engine is started again, after so many failures in a row
LASTING = 60.0  # seconds of service after which an end does not count as a failure in a row
POLL = 0.2  # seconds between two looks at whether the server closes

Closing = Callable[[], bool]


class Replica(Protocol):
    """A way to run one engine at a place. `start`, `ended` and `stop` are called by one thread, `close` by any."""

    place: Place
    progress: StartProgress  # of its last start

    def start(self, closing: Closing) -> None:
        """Start the engine and wait until it is ready. Raises a JaxserveError for what kept it from starting."""

    def ended(self, closing: Closing) -> str | None:
        """Wait for the end of the engine, and return why. "": as a front has asked. None: the server closes."""

    def stop(self, *, keep: bool) -> None:
        """End what is left of it, so that it can start again. keep: its devices, for that."""

    def close(self) -> bool:
        """End it for good; return False if it had to be killed."""


class Keeper:
    """Keeps an engine running as long as it is wanted. Writer: the thread of `run`; others call `want`."""

    def __init__(self, replica: Replica, closing: threading.Event) -> None:
        self.replica = replica
        self.ready = False
        self.startup = 0.0  # seconds that the last start took
        self.failure: str | None = None  # why the last start failed
        self._running = False  # something may be left to stop
        self._closing = closing
        self._change = threading.Condition()  # of `wanted`
        self.wanted = False

    @property
    def standing(self) -> Standing:
        """What the replica does. One that is lost counts as starting."""
        if self.wanted:
            return Standing.SERVING if self.ready else Standing.STARTING
        return Standing.DRAINING if self._running else Standing.STOPPED

    def want(self, wanted: bool) -> None:
        """Let the engine run, or not start again once it ends."""
        with self._change:
            self.wanted = wanted
            self._change.notify_all()

    def start(self) -> None:
        begun, self._running = time.monotonic(), True
        try:
            self.replica.start(self._closing.is_set)
        except JaxserveError as error:
            self.failure = str(error)
            raise
        self.startup, self.failure, self.ready = time.monotonic() - begun, None, True

    def run(self) -> None:
        """Start the engine whenever it has ended and is wanted, until the server closes."""
        failures, begun = 0, time.monotonic()
        while not self._closing.is_set():
            if not self.ready:
                if not self._due(pause(failures)):
                    failures = 0
                    self._park()
                    continue
                if not self._start():
                    failures += 1
                    continue
                begun = time.monotonic()
            why = self.replica.ended(self._closing.is_set)
            self.ready = False
            if why is None:
                return
            failures = 0 if not why else 1 if time.monotonic() - begun > LASTING else failures + 1
            self._report(why, failures)

    def _report(self, why: str, failures: int) -> None:
        name = self.replica.place.name
        if why:
            log.error("%s ended (%s); it starts again in %g s", name, why, pause(failures))
        elif self.wanted:
            log.info("%s starts again, as asked", name)

    def _due(self, seconds: float) -> bool:
        """Wait so many seconds; return early, with False, if the engine is not wanted."""
        end = time.monotonic() + seconds
        with self._change:
            while self.wanted and not self._closing.is_set():
                if (left := end - time.monotonic()) <= 0:
                    return True
                self._change.wait(min(left, POLL))
        return False

    def _park(self) -> None:
        """Give the devices back, and wait until the engine is wanted."""
        if self._running and not self._closing.is_set():
            self.replica.stop(keep=False)
            self._running = False
            log.info("%s has stopped", self.replica.place.name)
        with self._change:
            if not self.wanted:
                self._change.wait(POLL)

    def _start(self) -> bool:
        name, again = self.replica.place.name, self._running
        try:
            if again:
                self.replica.stop(keep=True)
            self.start()
        except JaxserveError as error:
            if not self._closing.is_set():
                log.error("%s did not start: %s", name, error)
            return False
        log.info("%s serves%s after %.1f s", name, " again" if again else "", self.startup)
        return True


class Engines:
    """Engines, one per replica. One that ends is started again, and found through its place."""

    def __init__(self, begin: int) -> None:
        """begin: the number of replicas that run at the start: the first ones. The subclass calls `_keep`."""
        self.begin = begin
        self.closing = threading.Event()
        self.keepers: list[Keeper] = []

    def _keep(self, replicas: Sequence[Replica]) -> None:
        self.keepers = [Keeper(replica, self.closing) for replica in replicas]
        for keeper in self.keepers[: self.begin]:
            keeper.want(True)

    @property
    def replicas(self) -> tuple[Any, ...]:
        """The replicas, running or not."""
        return tuple(keeper.replica for keeper in self.keepers)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where fronts find the engines: also those that do not run."""
        return tuple(keeper.replica.place for keeper in self.keepers)

    @property
    def progress(self) -> StartProgress:
        """The progress of the slowest of the first engines."""
        return slowest(keeper.replica.progress for keeper in self.keepers[: self.begin] if not keeper.ready)

    def wait(self) -> None:
        """Wait until the first engines are ready. Raises what kept one from starting."""
        with ThreadPoolExecutor(self.begin) as beside:
            for started in [beside.submit(keeper.start) for keeper in self.keepers[: self.begin]]:
                started.result()
        for at, watched in enumerate(self.keepers):
            threading.Thread(target=watched.run, name=f"jaxserve-keeper-{at}", daemon=True).start()

    def close(self) -> bool:
        """Close all engines; return False if one had to be killed."""
        self.closing.set()
        with ThreadPoolExecutor(max(1, len(self.keepers))) as beside:
            closed = list(beside.map(lambda keeper: keeper.replica.close(), self.keepers))
        return all(closed)


def pause(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row; 0: a restart that was asked for."""
    return PAUSES[min(max(failures, 1), len(PAUSES)) - 1]


def own_settings(config: ServeConfig, at: int) -> ServeConfig:
    """Return the settings of one engine: the keys stay with the fronts; journals, profiles and KV events are of one."""
    journal = config.journal
    if journal is not None and config.most_replicas > 1:
        path = Path(journal)
        journal = str(path.with_name(f"{path.stem}-{at}{path.suffix}"))
    mode = "colocated" if config.prefill_replicas else config.mode  # of a replica that prefills or decodes
    folder = config.profile_dir
    if folder is not None and config.most_replicas > 1:
        folder = str(Path(folder) / f"replica-{at}")  # jax names files by host and second
    events = config.kv_events_config
    if config.kv_events is not None and config.most_replicas > 1:
        events = ranked(config.kv_events, at * (config.mesh_shape or (1, 1))[0])
    own: dict[str, Any] = {"journal": journal, "profile_dir": folder, "kv_events_config": events}
    return replace(config, api_key=(), admin_key=(), mode=mode, **own)
