"""Memoized, bounded and vectorized code makes the same decisions as plain sequential code from scratch."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import feasibility
from jaxserve.sched.admission.dp import ByDP
from jaxserve.sched.api.perf import Array, Load, PerfModel
from jaxserve.sched.api.plan import StepResult
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import State
from jaxserve.sched.feasibility import (
    chunk_times,
    decode_load,
    fitting,
    largest_chunk,
    mixed_bound,
    on_time_set,
    remaining_work,
)
from jaxserve.sched.perf.linear import LinearModel
from jaxserve.sched.perf.model import Coefficients, Corrected, GeneralModel
from jaxserve.sched.perf.poly import Polynomial
from jaxserve.sched.perf.roofline import Roofline, Term
from jaxserve.sched.perf.table import TableModel
from jaxserve.sched.routing.base import Fleet, Move
from jaxserve.sched.routing.deflect import PROBES, Deflect
from tests.support.examples import examples
from tests.support.sched.fleet import decodes, instance, request

GENERAL = Coefficients(5e-3, 2e-5, 1e-5, 1e-10, 1e-8, 1e-8)
MODELS: dict[str, PerfModel] = {
    "general": GeneralModel(GENERAL),
    "experts": GeneralModel(Coefficients(5e-3, 2e-5, 1e-5, 1e-10, 1e-8, 1e-8, 0.01, 0.02)),
    "linear": LinearModel(5e-3, 2e-5, 1e-8),
    "roofline": Corrected(Roofline((Term(2e-5, 0.0, 4e-3), Term(1e-6, 0.0, 9e-3)), 1e-8)),
    "polynomial": Corrected(Polynomial(4e-3, 2e-5, 1e-10, 5e-3, 1e-5, 1e-8)),
    "table": TableModel.profiled(GeneralModel(GENERAL)),
}
MODEL = st.sampled_from(sorted(MODELS))


def plain_set(start: float, deadline: Array, work: Array, weight: Array | None = None) -> Array:
    """Compute the on-time set by the Moore-Hodgson algorithm, a job at a time."""
    chosen, heap, at = np.zeros(len(deadline), dtype=bool), [], start
    cost = work if weight is None else work / weight
    alone = [row for row in range(len(work)) if start + work[row] <= deadline[row]]
    for row in sorted(alone, key=lambda row: (deadline[row], row)):
        at += work[row]
        chosen[row] = True
        heappush(heap, (-cost[row], -row))
        while heap and at > deadline[row]:
            _, dropped = heappop(heap)
            at -= work[-dropped]
            chosen[-dropped] = False
    return chosen


WORK = st.one_of(st.integers(0, 4).map(float), st.floats(0.0, 4.0))
DUE = st.one_of(st.integers(0, 12).map(float), st.floats(-1.0, 12.0), st.sampled_from([inf, -inf]))


WEIGHT = st.sampled_from([0.25, 1.0, 3.0])


@given(st.lists(st.tuples(WORK, DUE, WEIGHT), min_size=1, max_size=30), st.booleans(), st.floats(0.0, 1.0))
def test_the_on_time_set_equals_that_of_a_loop(
    jobs: list[tuple[float, float, float]], weigh: bool, start: float
) -> None:
    work, due, weights = (np.array(column) for column in zip(*jobs, strict=True))
    weight = weights if weigh else None
    assert on_time_set(start, due, work, weight).tolist() == plain_set(start, due, work, weight).tolist()


EIGHTHS = st.integers(0, 96).map(lambda count: count / 8)  # sums are exact in any order


@given(st.lists(st.tuples(EIGHTHS, st.one_of(EIGHTHS, st.just(inf))), min_size=1, max_size=40), EIGHTHS)
@settings(max_examples=examples(400))
def test_the_on_time_set_of_many_jobs_equals_that_of_a_loop(jobs: list[tuple[float, float]], start: float) -> None:
    work, due = (np.array(column) for column in zip(*jobs, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feasibility, "MANY", 1)
        found = on_time_set(start, due, work).tolist()
    assert found == plain_set(start, due, work).tolist()


@given(MODEL, st.integers(0, 3000), st.integers(1, 3000), st.floats(0.0, 0.1), st.sampled_from([1, 64]))
def test_the_largest_chunk_equals_that_of_a_binary_search(
    model: str, done: int, left: int, bound: float, grid: int
) -> None:
    perf, load = MODELS[model], Load(decode=20, longest=900, context=9000)
    sizes = [*range(grid, left, grid), left] if left >= grid else [left]
    fits = [size for size in sizes if perf.step_time(load.add_chunk(size, done)) <= bound]
    assert largest_chunk(perf.step_time, load, done, left, bound, grid) == max(fits, default=0)


@given(MODEL, st.lists(st.integers(0, 100_000), min_size=1, max_size=9), st.integers(1, 8192))
def test_vectorized_chunk_times_equal_single_steps(model: str, contexts: list[int], tokens: int) -> None:
    perf, load = MODELS[model], Load(decode=20, longest=900, context=9000)
    alone = [perf.step_time(load.add_chunk(tokens, context)) for context in contexts]
    assert chunk_times(perf, load, tokens, np.array(contexts, dtype=float)).tolist() == alone


@given(MODEL, st.lists(st.integers(1, 20_000), min_size=1, max_size=40), st.floats(0.0, 0.03), st.integers(1, 3))
def test_rows_join_a_step_as_if_one_by_one(model: str, contexts: list[int], bound: float, each: int) -> None:
    perf, load, count = MODELS[model], Load(300, 5, 45_000.0, 700, 2500), 0
    step = load
    for context in sorted(contexts):
        step = step.add_rows(each, context, context)
        if perf.step_time(step) > bound:
            break
        count += 1
    rows, tokens = np.array(sorted(contexts), dtype=float), range(each, each * len(contexts) + each, each)
    assert fitting(perf.step_time, load, rows, bound, tokens) == count
    if each == 1:
        assert fitting(perf.step_time, load, rows, bound) == count


class Plain:
    """`deflect:dropped` over single prompts and instances, without memoization."""

    def redirect(self, fleet: Fleet) -> list[Move]:
        moves: list[Move] = []
        for index in fleet.entries:
            one = fleet.instances[index]
            at = one.view(fleet.now, max(fleet.now, one.ends))
            work = remaining_work(at, at.prefill)
            able = at.start + work <= at.prefill.deadline
            lost = able & ~on_time_set(at.start, np.where(able, at.prefill.deadline, -inf), work)
            for row in np.flatnonzero(lost).tolist():
                prompt = at.prefill[row]
                ends, best = min((self._ends(prompt.prompt_length, fleet, other), other) for other in fleet.decoders)
                waits = prompt.state is State.WAITING and ends - fleet.now <= 0.9 * (prompt.deadline - fleet.now)
                if waits and best not in {move.target for move in moves}:
                    moves.append(Move(prompt.id, index, best, ends))
        return moves

    def _ends(self, length: int, fleet: Fleet, index: int) -> float:
        one = fleet.instances[index]
        at = one.view(fleet.now, max(fleet.now, one.ends))
        tokens, bound = float(at.prefill.remaining.sum()) + length, mixed_bound(at, 0.75, 0.75, 0.75)
        if one.blocks.available * one.limits.page_size < length:
            return inf
        if bound == inf:
            alone = at.perf.prefill_times(np.array([tokens]), np.zeros(1), one.limits.tokens)
            return at.start + float(alone[0])
        load = decode_load(at.decode)
        first, second = (at.perf.step_time(load.add_chunk(probe, length // 2)) for probe in PROBES)
        slope = (second - first) / (PROBES[1] - PROBES[0])
        chunk = min(PROBES[0] + (bound - first) / slope if slope > 0 else inf, one.limits.tokens)
        return at.start + ceil(tokens / chunk) * bound if chunk >= 1 else inf


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 1 << 20), st.integers(1, 25))
def test_rerouting_equals_that_without_memoization(seed: int, prompts: int) -> None:
    random = np.random.default_rng(seed)
    fleet = Fleet(0.0, [instance(role) for role in (Role.PREFILL, Role.PREFILL, *(Role.DECODE,) * 5)], lambda _: 0.0)
    deflect, plain, moved = Deflect(dropped=True), Plain(), 0
    for id in range(prompts):
        if random.random() < 0.3:
            decodes(fleet.instances[int(random.integers(2, 7))], 1000 + id, int(random.integers(10, 300)))
        one = request(id, int(random.integers(10, 2000)), float(random.uniform(0.5, 8.0)))
        fleet.instances[int(random.integers(2))].add(one)
        fleet = fleet._replace(now=fleet.now + float(random.uniform(0.0, 0.1)))
        if random.random() < 0.5:
            fleet.instances[int(random.integers(2))].set_ends(fleet.now + float(random.uniform(0.0, 2.0)))
        moves = plain.redirect(fleet)
        assert list(deflect.redirect(fleet)) == moves
        for move in moves:
            fleet.instances[move.target].add(fleet.instances[move.source].release(move.request))
        moved += len(moves)


@settings(max_examples=examples(8), deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from([Role.PREFILL, Role.DECODE, Role.MIXED]), st.sampled_from([0, 2]))
def test_dp_admission_equals_that_without_memoization(seed: int, role: Role, draft: int) -> None:
    random = np.random.default_rng(seed)
    one, asked, now = instance(role), ByDP(), 0.0
    one.limits = replace(one.limits, draft=draft)
    for id in range(25):
        for attempt in range(2):  # each state is asked twice, then changed
            new = request(1000 + 2 * id + attempt, int(random.integers(10, 3000)), float(random.uniform(0.1, 8.0)))
            assert asked.admits(new, one, now) == ByDP().admits(new, one, now)
        event = random.random()
        if event < 0.5:
            one.add(request(id, int(random.integers(10, 2000)), float(random.uniform(0.5, 8.0))))
        elif event < 0.7 and role is not Role.PREFILL:
            decodes(one, id, int(random.integers(10, 300)))
        elif (plan := one.plan(now, now)) is not None:
            now += 0.01
            tokens = tuple((7,) if span.samples else () for span in plan.spans)
            one.settle(StepResult(plan.step, now - 0.01, now, tokens))


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_model_reports_when_it_has_learned(model: str) -> None:
    perf: PerfModel = MODELS[model]
    before = perf.version
    perf.observe(Load(decode=4, longest=100, context=400), 0.02)
    assert perf.version > before
