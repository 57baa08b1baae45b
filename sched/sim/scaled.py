"""Replicas that start and stop with the load, in virtual time. Each is an instance of the mesh."""

from __future__ import annotations

from .. import scaling
from ..api.errors import InvalidValue
from ..api.policy import Role
from ..api.request import Request
from ..cluster.cluster import Cluster
from ..scaling.base import Arrivals, Target
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
        if any(one.role is not Role.MIXED for one in schedulers):
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
        now = self._loop.now
        serving = [at for at, one in enumerate(self._schedulers) if not one.draining]
        fleet = self._cluster.kv_transfers.fleet()
        fleet = fleet._replace(instances=[fleet.instances[at] for at in serving])
        target = self._target.at(now, self._scaler.needed(fleet, self._arrivals))
        count = len(serving) + len(self._starting)
        if target > count:
            self._start(target - count)
        for at in sorted(serving, key=lambda at: (len(self._schedulers[at]), -at))[: max(0, len(serving) - target)]:
            self._schedulers[at].draining = True
        self._settle(now)
        self._loop.at(now + self._options.period, clock.EVENT, self._decide)

    def _start(self, count: int) -> None:
        """Let replicas that drain serve on, and start others for the rest."""
        idle = [at for at, one in enumerate(self._schedulers) if one.draining and at not in self._starting]
        for at in sorted(idle, key=lambda at: at not in self._since)[:count]:
            if at in self._since:
                self._schedulers[at].draining = False
            else:
                self._since[at] = self._loop.now
                self._starting.add(at)
                self._loop.at(self._loop.now + self._options.startup, clock.EVENT, self._ready, at)

    def _ready(self, at: int) -> None:
        self._starting.discard(at)
        self._schedulers[at].draining = False

    def _settle(self, now: float) -> None:
        """Stop the replicas that have drained."""
        for at in list(self._since):
            one = self._schedulers[at]
            if one.draining and at not in self._starting and not len(one):
                self._seconds += now - self._since.pop(at)
