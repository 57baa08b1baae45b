"""The fault matrix in virtual time with two instances per role: the outcome of every request under every policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.sched.api.plan import UNAVAILABLE, StepPlan
from jaxserve.sched.api.policy import Role
from tests.support.sched.harness import Job, simulate

SPLIT = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
NAMES = ("prefill0", "prefill1", "decode2", "decode3")
COUNT = 24
POLICIES = ["distserve", "kairos", "unified", "slos_serve"]
Fault = Callable[[str], dict[str, Any]]


def nth(number: int) -> Callable[[], bool]:
    """Return a function that is true only at its `number`-th call."""
    calls = [0]

    def now() -> bool:
        calls[0] += 1
        return calls[0] == number

    return now


def raises(name: str) -> dict[str, Any]:
    due = nth(3)
    return {"fails": lambda instance, plan: instance == name and due()}


def hangs(name: str, seconds: float = 300.0) -> dict[str, Any]:
    due = nth(3)

    def late(instance: str, plan: StepPlan) -> float:
        return seconds if instance == name and due() else 0.0

    return {"late": late}


def returns_late(name: str) -> dict[str, Any]:
    return hangs(name, 20.0)


def transfer_fails(name: str) -> dict[str, Any]:
    return {"loses": nth(4)}


def transfer_hangs(name: str) -> dict[str, Any]:
    due = nth(4)
    return {"slow": lambda: 1e4 if due() else 0.0}


EXPECTED: dict[Fault, set[str]] = {
    raises: {"stop"},
    hangs: {"stop", UNAVAILABLE},
    returns_late: {"stop"},
    transfer_fails: {"stop"},
    transfer_hangs: {"stop"},
}


def jobs() -> list[Job]:
    return [Job(range(index * 50, index * 50 + 4 + index % 9), 3 + index % 7, 0.3 * index) for index in range(COUNT)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", list(EXPECTED), ids=lambda fault: fault.__name__)
def test_every_request_ends(fault: Fault, name: str, policy: str) -> None:
    outcome = simulate(jobs(), SPLIT, policy=policy, routing="round_robin", rest=600.0, **fault(name))
    reasons = Counter(str(one.finish_reason) for one in outcome.requests)
    assert sum(reasons.values()) == COUNT and set(reasons) <= EXPECTED[fault], reasons
    assert reasons["stop"] >= COUNT - 2, reasons
    assert (reasons[UNAVAILABLE] > 0) is (UNAVAILABLE in EXPECTED[fault]), "the fault did not occur"
    assert outcome.counters[name].rebuilds == (fault is raises)
    for one in outcome.requests:
        told = outcome.deltas[one.id]
        assert sum(delta.finish_reason is not None for delta in told) == 1 and told[-1].finish_reason is not None
        assert sum(len(delta.tokens) for delta in told) == len(one.output)
        if one.finish_reason == "stop":
            assert len(one.output) == 3 + one.id % 7
        else:
            assert one.error
