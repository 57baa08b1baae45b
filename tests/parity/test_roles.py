"""Role changes on real executors change no token: at random steps, with running decodes moved."""

from __future__ import annotations

import io
import itertools
import json
from unittest.mock import patch

import pytest

from jaxserve.cli.replay import perf_of
from jaxserve.sched.api.policy import Role
from jaxserve.sched.cluster.cluster import Cluster
from jaxserve.sched.journal import Journal, replay
from jaxserve.sched.routing.base import Router
from tests.support.examples import cases
from tests.support.parity.asks import ROOMY, TIGHT, alone, asks, setup
from tests.support.parity.law import compare
from tests.support.parity.roles import RandomRoles

CASES = list(itertools.product(("2x1", "4x2"), (ROOMY, TIGHT), ("distserve", "kairos", "unified"), (1, 2)))
BARE = [("2x1", ROOMY, "unified", 1), ("2x1", TIGHT, "distserve", 2), ("4x2", ROOMY, "kairos", 1)]


@pytest.mark.parametrize("case", cases(BARE, CASES), ids=str)
def test_no_change_of_roles_changes_a_token(case: tuple[str, int, str, int]) -> None:
    mesh, pages, policy, seed = case
    file, changes = io.StringIO(), RandomRoles(seed, every=4)
    served, _ = setup(mesh, 64, pages).run(asks(seed), policy, journal=Journal(file), disturb=changes)
    assert changes.done > 3, "no role has changed"
    assert all(request.finish_reason in ("stop", "length") for request in served)
    assert compare(asks(seed), served, alone(seed)) <= 1
    outcome = replay(file.getvalue().splitlines(), perf_of)
    assert outcome.differences == [] and '"kind":"set_role"' in file.getvalue()


def test_running_decodes_move_without_recomputation() -> None:
    """After one swap during decoding, rows leave with their KV."""
    swapped = []

    def swap(cluster: Cluster) -> None:
        prefills, decodes = (core.scheduler for core in cluster.cores)
        if not swapped and len(decodes) >= 2 and not prefills.waiting:
            swapped.append([request.id for request in decodes])
            cluster.set_roles({0: Role.DECODE, 1: Role.PREFILL})

    served, cluster = setup("2x1", 64, ROOMY).run(asks(1), "distserve", disturb=swap)
    assert swapped and compare(asks(1), served, alone(1)) <= 1
    computed = sum(core.scheduler.counters.prompt_tokens for core in cluster.cores)
    assert computed <= sum(len(ask.prompt) for ask in asks(1)) and not any(request.drops for request in served)
    assert cluster.cores[0].scheduler.counters.steps > 0 and cluster.kv_transfers.transfers > len(swapped[0])


@pytest.mark.parametrize("policy", ["distserve", "unified"])
def test_a_request_without_a_slot_decodes_in_place(policy: str) -> None:
    """With few pages on the decode instance, every second request without pages decodes in place and may move later."""
    file = io.StringIO()
    with patch.object(Router, "decode_in_place", lambda self, request, index, fleet: request.id % 2 == 0):
        served, _ = setup("2x1", 64, TIGHT).run(asks(1), policy, journal=Journal(file), place="least_work")
    kept = {id for kind, id in map(_named, file.getvalue().splitlines()) if kind == "decode_in_place"}
    assert kept and all(id % 2 == 0 for id in kept)
    assert all(request.finish_reason in ("stop", "length") for request in served)
    assert compare(asks(1), served, alone(1)) <= 1
    assert replay(file.getvalue().splitlines(), perf_of).differences == []


def _named(line: str) -> tuple[str, int | None]:
    record = json.loads(line)
    return record["kind"], record.get("id")
