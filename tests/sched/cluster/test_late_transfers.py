"""KV transfers that are late or fail: no request ends, loses a token or waits for longer than the limit."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.policy import Role
from jaxserve.sched.instance.watchdog import PATIENT
from tests.support.examples import examples
from tests.support.sched.cases import JOBS, POLICIES, ROUTERS, SHAPE
from tests.support.sched.harness import LIMIT, Job, simulate
from tests.support.sched.laws import Watch, check_tokens, check_told
from tests.support.sched.roles import ROLE_CHANGES, SEVERAL, RoleChanges

P, D = Role.PREFILL, Role.DECODE
MOST = PATIENT.seconds
DELAYS = st.lists(st.sampled_from([0.0, 0.002, 1.0, MOST - 1, MOST + 1, 900.0, 1e4]), min_size=1, max_size=6)
FAILURES = st.lists(st.booleans(), min_size=1, max_size=6)


@settings(max_examples=examples(120))
@given(
    policy=st.sampled_from(POLICIES),
    mesh=st.sampled_from(sorted(SEVERAL)),
    routing=st.sampled_from(ROUTERS),
    jobs=JOBS,
    shape=SHAPE,
    delays=DELAYS,
    failures=st.one_of(st.just([False]), FAILURES),
    changes=st.one_of(st.just([]), ROLE_CHANGES),
)
def test_no_delay_or_failure_of_a_transfer_changes_a_token(
    policy: str,
    mesh: str,
    routing: str,
    jobs: list[Job],
    shape: dict[str, Any],
    delays: list[float],
    failures: list[bool],
    changes: RoleChanges,
) -> None:
    """Every request gets all its tokens, whatever the transfers to any instance take, and equal runs are equal."""
    histories = []
    for _ in range(2):
        watch, slow, loses = Watch(policy, seal=False), cycle(delays), cycle(failures)
        faults: dict[str, Any] = {"slow": lambda slow=slow: next(slow), "loses": lambda loses=loses: next(loses)}
        outcome = watch.run(jobs, SEVERAL[mesh], routing=routing, role_changes=changes, rest=LIMIT, **faults, **shape)
        check_told(outcome, jobs, False)
        check_tokens(outcome, watch.records, page_size=4)
        histories.append((watch.records, [one.token_times for one in outcome.requests]))
    assert histories[0] == histories[1]


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@pytest.mark.parametrize(("fault", "wait"), [({"slow": lambda: 1e4}, MOST), ({"loses": lambda: True}, 1.0)])
def test_requests_decode_in_place_if_no_transfer_arrives(fault: dict[str, Any], wait: float, first_token: str) -> None:
    """Each waits for one transfer. The pool of the decode instance has room for the pages of two."""
    jobs = [Job(range(100 * index, 100 * index + 12), 9, 200.0 * index) for index in range(6)]
    outcome = simulate(jobs, (P, D), pages=8, first_token=first_token, **fault)
    for request in outcome.requests:
        assert request.finish_reason == "stop" and len(request.output) == 9
        assert request.token_times[-1] - request.arrival < wait + 1.0
    assert {name for name, plan in outcome.plans if plan.spans} == {"prefill0"}
