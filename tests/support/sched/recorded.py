"""Runs recorded in a journal, and a check of their replay."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import IO, Any

from jaxserve.sched.api.log import Log
from jaxserve.sched.api.perf import PerfModel
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.journal import Journal, replay
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.sim.simulate import Logs
from tests.support.sched.complete import ROLES
from tests.support.sched.harness import COEFFICIENTS, Job, SimSetup, every, simulate


def perf(record: Mapping[str, Any]) -> PerfModel:
    return Recipe.of(record).make()


def recorded(jobs: list[Job], roles: str | Sequence[Role], policy: str, fail: int = 10_000, **shape: Any) -> str:
    """Return the journal of a run in which every `fail`-th step raises."""
    file = io.StringIO()
    journal, described = Journal(file), Recipe("general", coefficients=COEFFICIENTS).record()
    setup = {"policy": policy, "pages": 14, "rows": 4, "tokens": 16, "fails": every(fail), **shape}
    mesh = ROLES[roles] if isinstance(roles, str) else roles
    limits = SimSetup(mesh, **setup).limits()

    def log(name: str) -> Log:
        role = Role(name.rstrip("0123456789"))
        return journal.instance(name, policy=policy, limits=limits, role=role, prefix_caching=True, perf=described)

    simulate(jobs, mesh, log=log, **setup)
    return file.getvalue()


def journaled(file: IO[str], recipe: Recipe, options: Mapping[str, object] | None = None) -> Logs:
    """Record a simulation in the form of a server's journal."""
    journal = Journal(file)

    def logs(name: str, policy: str, limits: Limits, role: Role, prefix_caching: bool) -> Log:
        return journal.instance(
            name,
            policy=policy,
            limits=limits,
            role=role,
            prefix_caching=prefix_caching,
            perf=recipe.record(),
            options=options,
        )

    return logs


def check_replay(text: str) -> None:
    """Check that a replay makes the same plans and no others."""
    outcome = replay(text.splitlines(), perf)
    assert outcome.differences == [] and outcome.plans == text.count('"kind":"planned"')
