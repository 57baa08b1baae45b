"""Replicas that start and stop with the load, in virtual time. Each is an instance of the mesh."""

from __future__ import annotations

from .. import scaling
from ..api.errors import InvalidValue
from ..api.policy import Role
from ..api.request import Request
from ..cluster.cluster import Cluster
from ..scaling.base import Arrivals, Target
from ..scaling.changes import Standing, changes
from . import clock
from .options import Scaling


class ScaledReplicas:
    """Decides every period how many replicas serve. Writer: callbacks of the virtual loop.

    A replica costs from the decision to start it until its last request has ended.
    """

    def __init__(self, cluster: Cluster, options: Scaling, loop: clock.VirtualLoop) -> None:
        """Let the first `begin` replicas serve. Raises InvalidValue, also unless all instances are mixed."""
        schedulers = [core.scheduler for core in cluster.cores]
        most = len(schedulers)
        if any(replica.role is not Role.MIXED for replica in schedulers):
            raise InvalidValue("scaling needs instances that prefill and decode: colocated", "scaling")
        if not options.least <= options.begin <= most:
            raise InvalidValue(
                f"begin={options.begin} must be {options.least} to {most}, the replicas of the mesh", "scaling"
            )
        self._cluster = cluster
        self._schedulers = schedulers
        self._options = options
        self._loop = loop
        self._scaler = scaling.make(options.scaler)
        self._arrivals = Arrivals()
        self._target = Target(options.least, most, options.hold)
        self._starting = set[int]()
        self._since: dict[int, float] = dict.fromkeys(range(options.begin), 0.0)  # replicas that cost
        self._seconds = 0.0  # of those that cost no longer
        for scheduler in schedulers[options.begin :]:
            scheduler.draining = True
        loop.at(options.period, clock.EVENT, self._decide)

    def arrived(self, request: Request) -> None:
        """Count an arriving request."""
        self._arrivals.add(request, self._loop.now)

    def seconds(self, ended: float) -> float:
        """Return the seconds that all replicas have cost until the time `ended`."""
        return self._seconds + sum(max(0.0, ended - since) for since in self._since.values())

    def _decide(self) -> None:
        now, standing = self._loop.now, [self._standing(at) for at in range(len(self._schedulers))]
        fleet = self._cluster.kv_transfers.fleet()
        serving = [
            instance for instance, what in zip(fleet.instances, standing, strict=True) if what is Standing.SERVING
        ]
        target = self._target.at(now, self._scaler.needed(fleet._replace(instances=serving), self._arrivals))
        changed = changes(target, standing, [len(scheduler) for scheduler in self._schedulers])
        for at in changed.start:
            self._since[at] = now
            self._starting.add(at)
            self._loop.at(now + self._options.startup, clock.EVENT, self._ready, at)
        for at in changed.resume:
            self._schedulers[at].draining = False
        for at in changed.drain:
            self._schedulers[at].draining = True
        self._settle(now)
        self._loop.at(now + self._options.period, clock.EVENT, self._decide)

    def _standing(self, at: int) -> Standing:
        if not self._schedulers[at].draining:
            return Standing.SERVING
        if at in self._starting:
            return Standing.STARTING
        return Standing.DRAINING if at in self._since else Standing.STOPPED

    def _ready(self, at: int) -> None:
        self._starting.discard(at)
        self._schedulers[at].draining = False

    def _settle(self, now: float) -> None:
        """Stop the replicas that have drained."""
        for at in list(self._since):
            scheduler = self._schedulers[at]
            if scheduler.draining and at not in self._starting and not len(scheduler):
                self._seconds += now - self._since.pop(at)
