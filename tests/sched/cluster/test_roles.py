"""Role changes while requests are served: no request is lost, whatever the change and its time."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.cluster.cluster import check_roles
from jaxserve.sched.sim import Latency, Mesh, Options, Report, simulate
from jaxserve.sched.sim.workload import Arrival
from tests.support.examples import examples
from tests.support.sched.cases import ADMISSIONS, JOBS, POLICIES, ROUTERS, SHAPE, drawn
from tests.support.sched.harness import COEFFICIENTS, Job
from tests.support.sched.laws import check_laws
from tests.support.sched.roles import ROLE_CHANGES, SEVERAL, D, M, P, RoleChanges, run


@settings(max_examples=examples(60))
@given(
    policy=st.sampled_from(POLICIES),
    mesh=st.sampled_from(sorted(SEVERAL)),
    routing=st.sampled_from(ROUTERS),
    admission=st.sampled_from(ADMISSIONS),
    jobs=JOBS,
    shape=SHAPE,
    changes=ROLE_CHANGES,
)
def test_no_change_of_roles_loses_anything(policy, mesh, routing, admission, jobs, shape, changes) -> None:  # type: ignore[no-untyped-def]
    check_laws(policy, (mesh, routing, admission), jobs, shape, changes=changes)


def random_changes(draw: random.Random, count: int, instances: int = 4) -> RoleChanges:
    return [
        (draw.uniform(0, 0.1), {draw.randrange(instances): draw.choice([P, D, M]) for _ in range(draw.randint(1, 3))})
        for _ in range(count)
    ]


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_no_change_of_roles_loses_anything_under_any_policy(policy: str) -> None:
    for number in range(60):
        draw = random.Random(f"{policy} {number}")
        case = draw.choice(sorted(SEVERAL)), draw.choice(ROUTERS), draw.choice(ADMISSIONS)
        jobs, shape = drawn((policy, number))
        check_laws(policy, case, jobs, shape, changes=random_changes(draw, draw.randint(1, 20)))


# Single cases


def test_waiting_prompts_move_to_the_new_prefill_instance() -> None:
    jobs = [Job(range(n * 100, n * 100 + 60), 3) for n in range(6)]
    outcome = run([(0.0005, {1: D})], jobs, (P, P, D), routing="round_robin")
    prompts = {name: counters.prompt_tokens for name, counters in outcome.counters.items()}
    assert 0 < prompts["prefill1"] <= 60 and prompts["prefill0"] >= 5 * 60 and prompts["decode2"] == 0


@pytest.mark.parametrize("roles", [[P], [D], [P, P], [D, D], [P, M]])
def test_roles_without_prefill_or_decode_are_refused(roles: list[Role]) -> None:
    with pytest.raises(InvalidValue, match="are incomplete"):
        check_roles(roles)
    for others in ([M], [P, D], [M, D], [P, M, D], [M, M]):
        check_roles(others)


TINY = Latency("tiny", kv_bytes_per_token=1000, kv_tokens=400, page_size=4, coefficients=COEFFICIENTS)


def simulated(changes: tuple[tuple[float, tuple[Role, ...]], ...]) -> Report:
    arrivals = [Arrival(0.005 * n, 40, 10, SLO(inf, inf)) for n in range(20)]
    return simulate(arrivals, "distserve", Mesh(4), TINY, options=Options(turns=changes))


def test_a_simulation_changes_roles_as_its_options_say() -> None:
    before, after = simulated(()), simulated(((0.0, (P, D, D, D)), (0.05, (M, M, M, M))))
    assert after.summary.reasons == before.summary.reasons == {"stop": 20}
    assert before.busy[1] == 0.0 < after.busy[1]


@pytest.mark.parametrize("changes", [((0.1, (P, D)),), ((0.1, (P, P, P, P)),), ((-1.0, (M, M, M, M)),)])
def test_a_simulation_refuses_invalid_roles(changes: tuple[tuple[float, tuple[Role, ...]], ...]) -> None:
    with pytest.raises(InvalidValue, match="roles"):
        simulated(changes)


def test_running_decodes_move_away_from_an_instance_that_becomes_prefill() -> None:
    """If roles are swapped during decoding, the row moves and its KV is not recomputed."""
    jobs = [Job(range(30), 60)]
    still = run([], jobs)
    swapped = run([(0.02, {0: D, 1: P})], jobs)
    [one], [other] = still.requests, swapped.requests
    assert one.output == other.output and other.drops == 0
    where = [name for name, plan in swapped.plans for _ in plan.spans]
    assert [before for before, after in pairwise(where) if before != after] == ["prefill0", "decode1"]
    assert where[0] == where[-1] == "prefill0"
    computed = {name: counters.prompt_tokens for name, counters in swapped.counters.items()}
    assert computed == {"prefill0": 30, "decode1": 0}
