"""No schedule changes a vector: over chunks, page pressure, stopped steps, faults, role changes and a migration."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from jaxserve.cli.replay import perf_of
from jaxserve.generation.vectors import pooling_params, vector_of
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.pooling import POOLINGS
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.cluster.cluster import Cluster
from jaxserve.sched.journal import Journal, replay
from tests.support.engine.steps import GREEDY
from tests.support.parity.asks import ROOMY, TIGHT, Faults, asks, setup
from tests.support.parity.law import Ask
from tests.support.parity.roles import RandomRoles

CLOSE = 1e-4


@cache
def mixed(seed: int) -> tuple[Ask, ...]:
    """Return requests of which two of three want a vector; some of them lose their KV to others."""
    made = []
    for index, ask in enumerate(asks(seed, 15)):
        if index % 3:
            pooled = replace(ask.params, max_tokens=1, min_tokens=0, pooling=POOLINGS[index % 2])
            ask = replace(ask, params=pooled, tier=BEST_EFFORT if index % 5 else ask.tier)
        made.append(ask)
    return tuple(made)


@cache
def alone(seed: int) -> tuple[Request, ...]:
    return setup("1x1", 64, ROOMY).each(mixed(seed))


def compare(served: Sequence[Request], seed: int) -> None:
    found = 0
    for mine, reference in zip(served, alone(seed), strict=True):
        assert mine.finish_reason in ("stop", "length"), mine.error
        if mine.pooled is not None and reference.pooled is not None:
            one, other = vector_of(mine.pooled.vector()), vector_of(reference.pooled.vector())
            np.testing.assert_allclose(one, other, atol=CLOSE)
            assert len(one) == 64 and np.ptp(one) > 1
            found += 1
    assert found == 10


@pytest.mark.parametrize(
    ("mesh", "pages", "policy", "seed"),
    [("1x1", TIGHT, "unified", 1), ("2x1", TIGHT, "distserve", 2), ("2x1", ROOMY, "unified", 1)],
)
def test_no_schedule_changes_a_vector(mesh: str, pages: int, policy: str, seed: int) -> None:
    file = io.StringIO()
    served, cluster = setup(mesh, 32 if mesh == "1x1" else 64, pages).run(mixed(seed), policy, journal=Journal(file))
    compare(served, seed)
    if mesh == "2x1":
        assert cluster.kv_transfers.transfers > 0
    assert replay(file.getvalue().splitlines(), perf_of).differences == []


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_that_loses_its_kv_halfway_gives_the_same_vector(pooling: str) -> None:
    prompt = tuple(range(10, 250))
    ask, sent = Ask(prompt, pooling_params(pooling), tier=BEST_EFFORT), list[int]()
    engine = setup("1x1", 32, TIGHT)
    expected = engine.run([ask])[0][0].pooled

    def press(cluster: Cluster) -> None:
        """Submit a request whose 16 of 18 pages leave no room for the 4 or more of the one that has begun."""
        begun = [one.computed for one in cluster.cores[0].scheduler if 64 <= one.computed <= 128]
        if begun and not sent:
            sent.extend(begun)
            urgent = NewRequest(tuple(range(10, 250)), GREEDY, SLO())  # never late, and so never best effort itself
            cluster.submit(Request(1, urgent, engine.executors[0].now(), limit=2), lambda delta: None)

    served, _ = engine.run([ask], "unified", disturb=press)
    mine = next(one for one in served if one.id == 0)
    assert sent and len(served) == 2 and mine.drops > 0 and mine.pooled is not None and expected is not None
    assert mine.pooled.positions == (240 if pooling == "mean" else 1)
    np.testing.assert_allclose(vector_of(mine.pooled.vector()), vector_of(expected.vector()), atol=CLOSE)


def test_faults_and_role_changes_change_no_vector() -> None:
    file, changes = io.StringIO(), RandomRoles(1, every=4)
    served, cluster = setup("2x1", 64, ROOMY).run(
        mixed(1), "unified", Faults(every=9), journal=Journal(file), disturb=changes
    )
    compare(served, 1)
    assert changes.done > 1 and sum(core.scheduler.counters.rebuilds for core in cluster.cores) > 0
    assert replay(file.getvalue().splitlines(), perf_of).differences == []
