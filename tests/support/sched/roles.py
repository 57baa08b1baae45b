"""Runs with role changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from jaxserve.sched.api.policy import Role
from tests.support.sched import harness
from tests.support.sched.cases import MESHES, Case
from tests.support.sched.complete import check_complete
from tests.support.sched.harness import Job
from tests.support.sched.laws import Watch, check_tokens

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
SEVERAL = {name: roles for name, roles in MESHES.items() if len(roles) > 1}
TURN = st.tuples(st.floats(0, 0.06), st.dictionaries(st.integers(0, 3), st.sampled_from([P, D, M]), min_size=1))
ROLE_CHANGES = st.lists(TURN, min_size=1, max_size=8)
RoleChanges = Sequence[tuple[float, Mapping[int, Role]]]


def check(policy: str, case: Case, jobs: list[Job], shape: dict[str, Any], changes: RoleChanges) -> None:
    """Check all laws that hold with fixed roles, and that equal runs have equal histories."""
    mesh, routing, admission = case
    histories = []
    for _ in range(2):
        watch = Watch(policy, seal=False)
        outcome = watch.run(jobs, MESHES[mesh], routing=routing, admission=admission, role_changes=changes, **shape)
        check_complete(outcome, jobs, refuses=admission.endswith(":refuse"))
        check_tokens(outcome, watch.records, page_size=4)
        histories.append((watch.records, [one.token_times for one in outcome.requests]))
    assert histories[0] == histories[1]


def run(changes: RoleChanges, jobs: Sequence[Job], roles: Sequence[Role] = (P, D), **shape: Any) -> harness.Outcome:
    return harness.simulate(list(jobs), roles, role_changes=changes, **{"pages": 200, **shape})
