"""Role changes at random while requests are served."""

from __future__ import annotations

import random

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Role
from jaxserve.sched.cluster.cluster import Cluster


class RandomRoles:
    """Random role changes every few steps. Writer: the cluster's loop."""

    def __init__(self, seed: int, every: int) -> None:
        self._draw = random.Random(seed)
        self._every = every
        self._steps = 0
        self.done = 0

    def __call__(self, cluster: Cluster) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        before = [core.scheduler.role for core in cluster.cores]
        try:
            cluster.set_roles({index: self._draw.choice(list(Role)) for index in range(len(before))})
        except InvalidValue:
            return
        self.done += [core.scheduler.role for core in cluster.cores] != before
