"""Deflection, demotion and dropped KV change no token: best effort gives way at random times and resumes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from jaxserve.sched.api.new_request import STANDARD
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.cluster.cluster import Cluster
from jaxserve.sched.instance.step_builder import evict_best_effort
from tests.support.examples import cases
from tests.support.parity.asks import ROOMY, TIGHT, alone, asks, setup
from tests.support.parity.law import Ask, compare

ROUTERS = ("deflect:faster", "deflect:slo", "unified")
CASES = list(itertools.product(("1x1", "2x1", "4x2"), (ROOMY, TIGHT), ("distserve", "kairos", "unified"), ROUTERS))
BARE = [("1x1", TIGHT, "unified", "unified"), ("2x1", ROOMY, "distserve", "deflect:faster")]
BARE += [("4x2", ROOMY, "unified", "deflect:faster")]
MOST_RUNS = 8


class RandomDemotions:
    """Demote a request, or drop the KV of best effort, every few steps. Writer: the loop."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.demoted = self.dropped = 0

    def __call__(self, cluster: Cluster) -> None:
        for core in cluster.cores:
            one = core.scheduler
            if self._draw.random() < 0.15 and len(one):
                id = self._draw.choice([request.id for request in one])
                self.demoted += one._queues.demote(id)
            if self._draw.random() < 0.3:
                self.dropped += evict_best_effort(one._queues, one._kv) is not None
            core.wake()
        cluster.check()


def mixed(seed: int) -> list[Ask]:
    """Return requests of which every fourth is best effort."""
    return [replace(ask, tier=STANDARD if n % 4 else BEST_EFFORT) for n, ask in enumerate(asks(seed))]


@pytest.mark.parametrize("case", cases(BARE, CASES), ids=str)
def test_no_demotion_deflection_or_drop_changes_a_token(case: tuple[str, int, str, str]) -> None:
    """Check the law until all possible events have occurred, which depends on the speed of the machine."""
    mesh, pages, policy, place = case
    demoted = dropped = deflected = 0
    for seed in range(1, MOST_RUNS + 1):
        trouble = RandomDemotions(seed)
        served, cluster = setup(mesh, 64, pages).run(mixed(1), policy, place=place, disturb=trouble)
        assert all(request.finish_reason in ("stop", "length") for request in served)
        assert compare(asks(1), served, alone(1)) <= 1
        drops = sum(request.drops for request in served)  # small pools drop too if all rows are always submitted
        assert drops >= trouble.dropped
        demoted, dropped = demoted + trouble.demoted, dropped + drops
        deflected += cluster.deflections
        if demoted and dropped and (deflected or place != "deflect:faster" or mesh == "1x1"):
            return
    raise AssertionError(f"some event did not occur in {MOST_RUNS} runs: {demoted=} {dropped=} {deflected=}")
