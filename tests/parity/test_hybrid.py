"""The law of tokens for a model with a state per request: no fault, role change or cancellation changes a token.

Chunks, small pools, meshes and transfers are in `test_families.py`, stopped steps in `test_preempted.py`.
"""

from __future__ import annotations

from functools import cache

import pytest

from jaxserve.sched.api.request import Request
from tests.support.parity.asks import ROOMY, Faults, asks, begun
from tests.support.parity.families import model
from tests.support.parity.law import Setup, compare
from tests.support.parity.roles import RandomRoles

MODEL = model("Qwen3Next")


@cache
def setup() -> Setup:
    """Return two instances, whose slots hold the states of earlier tests."""
    return Setup("2x1", 64, ROOMY, model=MODEL)


@cache
def alone() -> tuple[Request, ...]:
    return setup().narrowed("1x1", 64, ROOMY).each(asks(1))


def test_faults_change_no_token() -> None:
    served, cluster = setup().run(asks(1), "unified", watch=Faults(every=9))
    assert sum(core.scheduler.counters.rebuilds for core in cluster.cores) > 0
    assert compare(asks(1), served, alone(), MODEL) <= 1


@pytest.mark.parametrize("policy", ["unified", "distserve", "kairos"])
def test_role_changes_move_states_with_running_decodes(policy: str) -> None:
    changes = RandomRoles(1, every=4)
    served, cluster = setup().run(asks(1), policy, disturb=changes)
    assert changes.done > 1 and cluster.kv_transfers.transfers > 0
    assert compare(asks(1), served, alone(), MODEL) <= 1


def test_requests_that_another_engine_has_begun_go_on() -> None:
    requests = begun(asks(1), alone())
    served, _ = setup().run(requests, "unified")
    assert compare(requests, served, alone(), MODEL) <= 1


def test_slots_of_cancelled_requests_are_used_again() -> None:
    requests = asks(1, cancel=True)
    for _ in range(2):
        served, _ = setup().run(requests, "unified")
        assert any(request.finish_reason == "abort" for request in served)
        compare(requests, served, alone(), MODEL)


def test_a_transfer_without_its_state_would_change_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests could not fail if states did not matter."""
    for executor in setup().executors:
        monkeypatch.setattr(executor, "export_state", lambda slot: None)
    served, cluster = setup().run(asks(1), "distserve")
    assert cluster.kv_transfers.transfers > 0
    differ = [mine.output != other.output for mine, other in zip(served, alone(), strict=True)]
    assert sum(differ) > 3
