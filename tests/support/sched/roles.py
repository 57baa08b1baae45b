"""Runs with role changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from jaxserve.sched.api.policy import Role
from tests.support.sched import harness
from tests.support.sched.cases import MESHES
from tests.support.sched.harness import Job

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
SEVERAL = {name: roles for name, roles in MESHES.items() if len(roles) > 1}
TURN = st.tuples(st.floats(0, 0.06), st.dictionaries(st.integers(0, 3), st.sampled_from([P, D, M]), min_size=1))
ROLE_CHANGES = st.lists(TURN, min_size=1, max_size=8)
RoleChanges = Sequence[tuple[float, Mapping[int, Role]]]


def run(changes: RoleChanges, jobs: Sequence[Job], roles: Sequence[Role] = (P, D), **shape: Any) -> harness.Outcome:
    return harness.simulate(list(jobs), roles, role_changes=changes, **{"pages": 200, **shape})
