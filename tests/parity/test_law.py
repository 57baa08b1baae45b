"""No schedule changes the tokens: batches, policies, chunk sizes, meshes, page pressure, hits, migration, faults.

The bare run takes a sample of the matrix (`sample`) on executors that its cases share; `-m full` runs all of it, each
size with executors of its own.
"""

from __future__ import annotations

import itertools
import random

import pytest

from jaxserve.sched.api.params import SamplingParams
from tests.support.examples import cases
from tests.support.parity.asks import ROOMY, TIGHT, Faults, alone, asks, setup
from tests.support.parity.law import SPEC, Ask, compare

POLICIES = ("distserve", "kairos", "unified")
MESHES = ("1x1", "2x1", "4x2", "2x4")
CHUNKS = (16, 64, 256)


CASES = list(itertools.product(MESHES, CHUNKS, (ROOMY, TIGHT), POLICIES, (1, 2)))


def sample() -> list[tuple[str, int, int, str, int]]:
    """Return a few cases: every mesh with two chunk sizes and many or few pages; every policy with both."""
    picked = []
    for m, mesh in enumerate(MESHES):
        for c, chunk in list(enumerate(CHUNKS))[m % 2 :][:2]:
            picked.append((mesh, chunk, (ROOMY, TIGHT)[(m + c) % 2], POLICIES[(m + c) % 3], 1 + c % 2))
    return picked


STOPPED: dict[str, list[int]] = {}


@pytest.mark.parametrize("case", cases(sample(), CASES), ids=str)
def test_no_schedule_changes_the_tokens(case: tuple[str, int, int, str, int]) -> None:
    mesh, chunk, pages, policy, seed = case
    requests = asks(seed)
    served, cluster = setup(mesh, chunk, pages).run(requests, policy)
    STOPPED["x".join(map(str, case))] = [compare(requests, served, alone(seed)), len(requests)]
    assert all(request.finish_reason in ("stop", "length") for request in served)
    if mesh != "1x1":
        assert cluster.kv_transfers.transfers > 0, "no KV was transferred"
    if pages == ROOMY:
        assert sum(core.scheduler.counters.prefix_hits for core in cluster.cores) > 0, "there was no prefix hit"


@pytest.mark.parametrize("policy", ["distserve", "unified"])
def test_a_prompt_computed_on_a_decode_instance_keeps_its_tokens(policy: str) -> None:
    requests = asks(1)
    served, cluster = setup("2x1", 64, ROOMY).run(requests, policy, place="deflect:faster")
    STOPPED[f"deflected {policy}"] = [compare(requests, served, alone(1)), len(requests)]
    prompts = {core.name: core.scheduler.counters.prompt_tokens for core in cluster.cores}
    assert all(prompts.values()), f"nothing was deflected: {prompts}"


def test_close_calls_are_rare() -> None:
    """At most one comparison in a hundred may stop at a close call."""
    if not STOPPED:
        pytest.skip("no comparison ran in this session")
    stopped, compared = (sum(column) for column in zip(*STOPPED.values(), strict=True))
    assert stopped <= 0.01 * compared, STOPPED


def test_the_same_buckets_give_equal_bits() -> None:
    """With the same mesh and chunks, other arrival orders and policies give equal tokens without tolerance."""
    requests = asks(1)
    first, _ = setup("1x1", 64, ROOMY).run(requests, "distserve")
    again, _ = setup("1x1", 64, ROOMY).run(requests, "distserve")
    assert [request.output for request in first] == [request.output for request in again]


def test_page_pressure_drops_kv_but_no_token() -> None:
    draw = random.Random(7)
    requests = [
        Ask(
            tuple(draw.randrange(8, SPEC.vocab) for _ in range(60)),
            SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True),
        )
        for _ in range(5)
    ]
    tight, roomy = setup("1x1", 64, TIGHT), setup("1x1", 64, ROOMY)
    served, cluster = tight.run(requests, "distserve")
    assert sum(request.drops for request in served) == cluster.cores[0].scheduler.counters.preemptions > 0
    compare(requests, served, roomy.each(requests))


@pytest.mark.parametrize("mesh", ["1x1", "2x1"])
def test_cancelling_requests_does_not_change_the_others(mesh: str) -> None:
    requests = asks(1, cancel=True)
    served, _ = setup(mesh, 64, TIGHT).run(requests, "kairos")
    compare(requests, served, alone(1))
    assert any(request.finish_reason == "abort" for request in served)


@pytest.mark.parametrize("mesh", ["1x1", "2x1"])
def test_steps_that_raise_do_not_change_the_tokens(mesh: str) -> None:
    """Steps raise on the device: pools are rebuilt, and requests resume from their tokens."""
    requests, fault = asks(2), Faults(every=9)
    served, cluster = setup(mesh, 64, ROOMY).run(requests, "distserve", fault)
    assert sum(core.scheduler.counters.rebuilds for core in cluster.cores) >= 2
    compare(requests, served, alone(2))
