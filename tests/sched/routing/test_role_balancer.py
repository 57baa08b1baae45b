"""`unified` changes the roles of instances when slots for decoding are scarce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from jaxserve.sched.api.policy import Role
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.routing.base import Fleet
from jaxserve.sched.routing.role_balancer import RoleBalancer
from tests.support.sched.fleet import decodes, fleet, instance
from tests.support.sched.fleet import request as prompt

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def full(roles: Sequence[Role], tpot: float, rows: int = 1) -> Fleet:
    """Return a fleet with all slots of its decode instances taken and a request waiting for each of them.

    Decode steps take 10 ms and 1 ms per row.
    """
    instances = [instance(role, rows=rows) for role in roles]
    for at, one in enumerate(instances):
        if one.role is D:
            for row in range(rows):
                decodes(one, 10 * at + row, 16, tpot)
            one.set_kv_waiting(1)
    return fleet(instances)


def apply_roles(balancer: RoleBalancer, now: Fleet, offered: float) -> Mapping[int, Role]:
    """Apply the role changes of the router and return them."""
    roles = balancer.roles(now, offered)
    for index, role in roles.items():
        now.instances[index].set_role(role)
    return roles


@pytest.mark.parametrize(
    ("roles", "tpot", "offered", "expected"),
    [
        ((P, P, D, D), 0.05, 0.25, {0: D}),
        (
            (P, P, D, D),
            0.05,
            0.26,
            {0: M, 1: M, 2: M, 3: M},
        ),  # the other prefill instance would have too much work; 22 ms are within 50 ms
        ((P, P, D, D), 0.02, 0.26, {}),
        ((P, P, P, D), 0.02, 0.26, {0: D}),
        ((P, P, P, D), 0.03, 0.6, {}),  # 44 ms exceed the TPOT
        ((P, D, D), 0.012, 0.0, {}),  # no other instance prefills
        ((P, M, D), 0.02, 0.0, {}),
    ],
)
def test_scarce_slots_change_the_role_of_an_instance(
    roles: Sequence[Role], tpot: float, offered: float, expected: Mapping[int, Role]
) -> None:
    assert RoleBalancer(0.95).roles(full(roles, tpot), offered) == expected


def test_roles_stay_while_a_slot_is_free_or_no_request_waits() -> None:
    now = full((P, P, D, D), 0.02)
    now.instances[2].set_kv_waiting(0)
    assert RoleBalancer(0.95).roles(now, 0.0) == {}
    now = full((P, P, D, D), 0.02, rows=2)
    now.instances[3].cancel(30, "stop")
    assert RoleBalancer(0.95).roles(now, 0.0) == {}


def test_the_least_loaded_instance_changes_and_changes_back_as_prompts_or_slots_allow() -> None:
    for offered, ended, back in ((0.1, 0, {}), (0.6, 0, {1: P}), (0.1, 2, {1: P})):
        balancer, now = RoleBalancer(0.95), full((P, P, D, D), 0.02, rows=2)
        first: Scheduler = now.instances[0]
        decodes(first, 1, 16)
        first.add(prompt(2, 100))
        assert apply_roles(balancer, now, 0.1) == {1: D}
        for one in now.instances:
            one.set_kv_waiting(0)
        for id in (20, 21)[:ended]:
            now.instances[2].cancel(id, "stop")
        assert apply_roles(balancer, now, offered) == back
        assert apply_roles(balancer, now, 0.6) == ({} if back else {1: P})
