"""One replica in a Ray cluster: a placement group, and an actor for each of its nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.fleet.messages import Failure
from jaxserve.fleet.nodes import Shares
from jaxserve.fleet.supervisor import CLOSING
from jaxserve.kv.share import KVShare
from jaxserve.ray.actor import THREADS, EngineActor
from jaxserve.report.start import StartProgress
from jaxserve.wire.address import Address, Place

PLACING = 30.0  # seconds in which free devices must be found
POLL = 0.2  # seconds between two looks at whether the server closes
GONE = (ray.exceptions.RayActorError, ray.exceptions.RaySystemError)


class RayReplica:
    """A Replica in a cluster, see fleet/supervisor.py."""

    progress = StartProgress()  # an actor does not tell how far it is

    def __init__(
        self,
        config: ServeConfig,
        place: Place,
        more: Callable[[], tuple[str, Shares]],
        host: str | None,
        kv: KVShare | None = None,
    ) -> None:
        """Create a replica without devices.

        more: finds devices for it, of one kind; it may raise. host: where the engine listens; None: its node's
        address. kv: how it exchanges KV with other engines; None: it does not.
        """
        self._config, self.place, self._more, self._host, self._kv = config, place, more, host, kv
        self._kind = ""
        self._shares: Shares = ()
        self._group: Any = None
        self._actors: list[Any] = []
        self._running: list[Any] = []  # calls that return when the engine has ended
        self._pids: list[int] = []
        self._lock = threading.Lock()  # between `reserve` and `close`
        self._closed = False

    def reserve(self, kind: str, shares: Shares) -> None:
        """Ask for devices. kind: of the devices."""
        strategy = "STRICT_PACK" if len(shares) == 1 else "STRICT_SPREAD"
        with self._lock:
            if self._closed:
                raise JaxserveError("the server closes")
            self._kind, self._shares = kind, shares
            self._group = placement_group(
                [{kind: devices} for devices in shares], strategy=strategy, name=self.place.name
            )
            self._actors = [self._actor(at) for at in range(len(shares))]

    def _actor(self, at: int) -> Any:
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=at)
        takes: dict[str, Any] = {"CPU": {"num_cpus": self._shares[at]}, "GPU": {"num_gpus": self._shares[at]}}.get(
            self._kind, {"resources": {self._kind: self._shares[at]}}
        )
        options = {"num_cpus": 0, **takes, "scheduling_strategy": where, "max_concurrency": THREADS, "max_restarts": -1}
        return ray.remote(EngineActor).options(**options).remote()

    def _placed(self) -> None:
        """Wait for the devices. Raises InvalidValue if other jobs of the cluster hold them."""
        if not self._group.wait(PLACING):
            free = ray.available_resources().get(self._kind, 0)
            need = " + ".join(map(str, self._shares))
            raise InvalidValue(
                f"{self.place.name} needs {need} {self._kind} and {free:g} are free in the Ray cluster: other jobs "
                "hold the rest (`ray status`); end them, or ask for fewer replicas",
                "replicas",
            )

    def start(self, closing: Callable[[], bool] = lambda: False) -> None:
        try:
            if self._group is None:
                self.reserve(*self._more())
            self._placed()
            self._start(closing)
        except ray.exceptions.RayError as error:
            raise JaxserveError(f"{self.place.name}: {_line(error)}") from error

    def _start(self, closing: Callable[[], bool]) -> None:
        self._running = []
        self._pids = [self._patiently(actor.pid.remote, closing) for actor in self._actors]  # waits for restarts
        leader, *followers = self._actors
        span = None
        if followers:
            meet = partial(leader.meet.remote, self.place.key, len(self._shares), self._shares[0])
            span = self._patiently(meet, closing)
        self._running = [follower.follow.remote(self._config, span, rank) for rank, follower in enumerate(followers, 1)]
        begin = partial(leader.start.remote, self._config, self.place.key, self._host, span, self._kv)
        answer = self._patiently(begin, closing)
        if isinstance(answer, Failure):
            raise answer.error()
        self._running.append(leader.watch.remote())
        self.place.address.publish(Address.parse(answer))

    def _patiently(self, ask: Callable[[], Any], closing: Callable[[], bool]) -> Any:
        """Return the result of a call, made again while Ray restarts the actor's process."""
        while True:
            call = ask()
            try:
                while not ray.wait([call], timeout=POLL)[0]:
                    if closing():
                        raise JaxserveError("the server closes")
                    if self._running and (ended := ray.wait(self._running, timeout=0)[0]):
                        raise JaxserveError(f"a host of {self.place.name} ended: {_said(ended[0])}")
                return ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                time.sleep(POLL)
            except GONE as error:
                raise JaxserveError(f"the actor of {self.place.name} ended: {_line(error)}") from error
            except ray.exceptions.RayTaskError as error:
                raise JaxserveError(f"{self.place.name}: {_line(error)}") from error

    def ended(self, closing: Callable[[], bool]) -> str | None:
        while not closing():
            ended, _ = ray.wait(self._running, timeout=POLL)
            if ended and not closing():
                return _said(ended[0])
        return None

    def stop(self, *, keep: bool) -> None:
        """End what is left of the processes; with `keep` Ray starts new ones, whose engines wait for `start`."""
        self.place.address.vacate()
        if not keep:
            self._release()
            return
        for actor, pid in zip(self._actors, self._pids, strict=False):  # no pids: it has never started
            try:
                ray.get(actor.leave.remote(pid), timeout=CLOSING)
            except ray.exceptions.GetTimeoutError:
                ray.kill(actor, no_restart=False)
            except ray.exceptions.RayError:
                continue  # it has left

    def close(self) -> bool:
        with self._lock:
            self._closed = True
        return self._release()

    def _release(self) -> bool:
        """Close the engine and give its devices back; return False if it had to be killed."""
        with self._lock:
            actors, self._actors = self._actors, []
            group, self._group = self._group, None
            pids, self._pids = self._pids, []
        closed = not pids  # it has never started
        if actors and not closed:
            with suppress(ray.exceptions.RayError):
                closed = bool(ray.get(actors[0].close.remote(), timeout=CLOSING))
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            remove_placement_group(group)
        return closed


def _said(call: Any) -> str:
    """Return why a call that should run on has ended; "" if as asked."""
    try:
        answer = ray.get(call)
    except ray.exceptions.RayError as error:
        return _line(error)
    return answer.message if isinstance(answer, Failure) else ""


def _line(error: BaseException) -> str:
    """Return the last line of an error, which for those of an actor says why it died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
