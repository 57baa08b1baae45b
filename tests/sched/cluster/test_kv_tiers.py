"""KV tiers behind simulated instances: what leaves a pool is found again, and nothing is lost."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cluster.cluster import Cluster
from jaxserve.sched.cluster.kv_tier import KVTier
from jaxserve.sched.sim.tiers import Tiers
from tests.support.examples import examples
from tests.support.sched.complete import JOB, ROLES, check_complete
from tests.support.sched.harness import Job, every, simulate
from tests.support.sched.tiers import FAST, PAGE, TIERS


def run(jobs: list[Job], tiers: Tiers, **shape: Any) -> tuple[Any, Cluster, list[KVTier]]:
    seen: list[Cluster] = []
    outcome = simulate(jobs, tiers=tiers, watch=seen.append, **shape)
    found, tier = [], seen[0].copy_out._store
    while isinstance(tier, KVTier):
        found.append(tier)
        tier = tier.below
    return outcome, seen[0], found


@given(
    jobs=st.lists(JOB, min_size=1, max_size=8),
    tiers=TIERS,
    roles=st.sampled_from(list(ROLES.values())),
    pages=st.sampled_from([9, 14, 64]),
    fail=st.sampled_from([10_000, 4, 7]),
)
@settings(max_examples=examples(100))
def test_tiers_lose_no_request_and_no_page(jobs, tiers, roles, pages, fail) -> None:  # type: ignore[no-untyped-def]
    """Steps raise as well, which costs an instance its pool while its pages are copied."""
    outcome, _, found = run(jobs, tiers, roles=roles, pages=pages, rows=4, tokens=16, fails=every(fail))
    if fail == 10_000:
        check_complete(outcome, jobs, cancelled=True)
    for tier in found:
        assert len(tier.index) <= tier.index.capacity and tier.stats.missing == 0
        assert len(tier.index) == tier.stats.stores - tier.index.evictions


def returning(others: int = 4) -> list[Job]:
    """A prompt, others that evict it from a pool of 32 pages of 4 tokens, and the prompt again."""
    between = [Job(range(1000 * at, 1000 * at + 80), 2, float(at)) for at in range(1, others + 1)]
    return [Job(range(81), 2), *between, Job(range(81), 2, others + 1.0)]


def cached(tiers: Tiers) -> int:
    return int(run(returning(), tiers, pages=32)[0].requests[-1].cached)


def test_a_tier_finds_what_the_pool_has_evicted() -> None:
    assert cached(Tiers()) == 0
    assert cached(Tiers(host_memory=200 * PAGE, **FAST)) == 80
    assert cached(Tiers(disk_size=200 * PAGE, **FAST)) == 80


def test_what_host_memory_evicts_is_on_disk() -> None:
    tiers = Tiers(host_memory=10 * PAGE, disk_size=200 * PAGE, **FAST)
    outcome, cluster, (host, disk) = run(returning(), tiers, pages=32)
    assert outcome.requests[-1].cached == 80
    assert host.index.evictions > 0 and disk.stats.hits > 0 and cluster.prefix_fetch.failures == 0


def test_a_page_is_copied_once() -> None:
    jobs = [Job([*range(40), 900 + at], 2, float(at)) for at in range(5)]
    _, cluster, (host,) = run(jobs, Tiers(host_memory=200 * PAGE, **FAST))
    assert cluster.copy_out.pages == host.stats.stores == 10


def test_a_slow_tier_makes_copies_skip_and_no_request_wait() -> None:
    slow = {**FAST, "host_bandwidth": PAGE / 2.0}  # a page in 2 s
    jobs = [Job(range(1000 * at, 1000 * at + 80), 2, 0.1 * at) for at in range(40)]
    outcome, cluster, _ = run(jobs, Tiers(host_memory=10_000 * PAGE, **slow), pages=32)
    alone = simulate(jobs, pages=32)
    assert [request.first_token_at for request in outcome.requests] == [r.first_token_at for r in alone.requests]
    assert cluster.copy_out.skipped > 500


def test_clearing_the_prefix_cache_clears_the_tiers() -> None:
    _, _, (host, disk) = run(returning(), Tiers(10 * PAGE, 200 * PAGE, **FAST), pages=32)
    assert len(host.index) == 10 and len(disk.index) > 0
    host.clear()
    assert len(host.index) == len(disk.index) == 0
