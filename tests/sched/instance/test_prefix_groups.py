"""Groups of spans that read a common prefix together: legal, worth it, and priced."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.plan import LEAST_SHARING, SharedPrefix, StepPlan
from jaxserve.sched.instance.prefix_groups import LEAST_TOKENS, grouped
from jaxserve.sched.instance.scheduler import Scheduler
from tests.support.examples import examples
from tests.support.sched.harness import Job, simulate

CHAINS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=24)


def tables_of(rows: list[tuple[int, int, int]], seed: int) -> tuple[Any, Any]:
    """Return tables [S, P] and full pages [S]: some pages of all, then of a branch, then of the row."""
    fresh = iter(np.random.default_rng(seed).permutation(1000).tolist())
    trunk = [next(fresh) for _ in range(6)]
    branches = [[next(fresh) for _ in range(5)] for _ in range(4)]
    chains = [[*trunk[:stem], *branches[branch], *(next(fresh) for _ in range(own))] for stem, branch, own in rows]
    table = np.zeros((len(rows), max(map(len, chains))), np.int64)
    for row, chain in enumerate(chains):
        table[row, : len(chain)] = chain
    return table, np.array([len(chain) for chain in chains])


@given(rows=CHAINS, seed=st.integers(0, 9), least=st.integers(1, 4), cut=st.integers(0, 9))
@settings(max_examples=examples(200))
def test_groups_are_legal(rows: list[tuple[int, int, int]], seed: int, least: int, cut: int) -> None:
    """Each row is in at most one group, and a group's pages lead the table of each member and are full."""
    tables, full = tables_of(rows, seed)
    full = np.maximum(full - cut, 0)
    slots = np.random.default_rng(seed).permutation(len(rows))
    found = grouped(tables[np.argsort(slots)], slots, full, least)
    members = [row for group in found for row in group.spans]
    assert len(members) == len(set(members))
    for spans, pages in found:
        assert len(spans) >= LEAST_SHARING
        assert pages >= least
        assert (tables[list(spans), :pages] == tables[spans[0], :pages]).all()
        assert (full[list(spans)] >= pages).all()
    assert found == grouped(tables[np.argsort(slots)], slots, full, least), "the choice is deterministic"


@given(rows=CHAINS, seed=st.integers(0, 9))
@settings(max_examples=examples(60))
def test_groups_save_as_much_as_one_group_of_any_prefix(rows: list[tuple[int, int, int]], seed: int) -> None:
    tables, full = tables_of(rows, seed)
    saved = sum((len(spans) - 1) * pages for spans, pages in grouped(tables, np.arange(len(rows)), full, 2))
    for pages in range(2, tables.shape[1] + 1):
        for leader in np.flatnonzero(full >= pages):
            same = (full >= pages) & (tables[:, :pages] == tables[leader, :pages]).all(axis=1)
            if same.sum() >= LEAST_SHARING:
                assert saved >= (same.sum() - 1) * pages


@given(
    decodes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 99)), max_size=12),
    chunks=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 99)), max_size=4),
)
def test_a_shared_load_is_never_below_its_longest_context(
    decodes: list[tuple[int, int]], chunks: list[tuple[int, int]]
) -> None:
    """Each row: its group, and how much longer it is than the prefix of 40 tokens per group."""
    load, groups = Load(), []
    for group, more in decodes:
        load = load.add_decode(40 * group + more)
    for group, more in chunks:
        load = load.add_chunk(8, 40 * group + more)
    for group in (1, 2, 3):
        steps, prompts = (sum(one == group for one, _ in rows) for rows in (decodes, chunks))
        if steps + prompts:
            groups.append(SharedPrefix(tuple(range(steps + prompts)), 10 * group, steps))
    shared = load.share(groups, 4)
    assert shared.longest <= shared.context <= load.context
    assert 0 <= shared.prefix <= load.prefix
    readings = {group for group, _ in [*decodes, *chunks]}
    own = sum(more for _, more in [*decodes, *chunks])
    assert shared.context + shared.prefix == own + sum(40 * group for group in readings), "each prefix is read once"


class Checked(Scheduler):
    """A scheduler that checks the groups of every plan."""

    def plan(self, now: float, start: float) -> StepPlan | None:
        plan = super().plan(now, start)
        if plan is not None:
            for spans, pages, _ in plan.shared:
                tables = [self._queues.requests[plan.spans[index].request].pages[:pages] for index in spans]
                computed = min(plan.spans[index].start for index in spans)
                assert all(table == tables[0] for table in tables)
                assert LEAST_TOKENS <= pages * self.limits.page_size <= computed
        return plan


@given(
    heads=st.lists(st.integers(0, 2), min_size=6, max_size=12),
    draft=st.sampled_from([0, 2]),
    pages=st.sampled_from([200, 500]),
    policy=st.sampled_from(["distserve", "unified"]),
)
@settings(max_examples=examples(30), deadline=None)
def test_plans_share_what_is_computed_and_no_output_changes(
    heads: list[int], draft: int, pages: int, policy: str
) -> None:
    """Several prompts begin alike; a few pages drop KV, a draft may be rejected."""
    shape = {"rows": 8, "tokens": 64, "page_size": 8, "pages": pages, "draft": draft, "acceptance": 0.5}
    jobs = [Job([*range(1000 * head, 1000 * head + 280), 9000 + at], 30, at * 0.01) for at, head in enumerate(heads)]
    plain = simulate(jobs, policy=policy, **shape)
    less = simulate(jobs, policy=policy, **shape, cascade=True, scheduler=Checked)
    assert not any(plan.shared for _, plan in plain.plans)
    assert [len(one.output) for one in plain.requests] == [len(one.output) for one in less.requests]


def test_a_shared_prefix_makes_steps_cheaper() -> None:
    jobs = [Job([*range(600), 1000 + at], 40, arrival=1.0 * (at > 0)) for at in range(8)]
    shape = {"rows": 8, "page_size": 8, "pages": 400}
    plain, less = simulate(jobs, **shape), simulate(jobs, **shape, cascade=True, scheduler=Checked)
    assert max(len(group.spans) for _, plan in less.plans for group in plan.shared) == 7
    assert less.requests[-1].token_times[-1] < plain.requests[-1].token_times[-1]
