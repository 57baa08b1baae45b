"""The dynamic program against its definition: all subsets, and the example of the paper."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched import routing
from jaxserve.sched.admission.dp import ByDP
from jaxserve.sched.admission.none import AdmitAll
from jaxserve.sched.api.new_request import STANDARD, NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.perf import Array
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO, THINKING
from jaxserve.sched.api.thinking import ThinkingEnd
from jaxserve.sched.feasibility import Mask
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.buckets import Buckets, Padded
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.fcfs import Fcfs
from jaxserve.sched.policies.slos_serve import dp
from jaxserve.sched.policies.slos_serve.commitments import Commitments, Prompts, demand
from jaxserve.sched.policies.slos_serve.dp import admitted, largest_set, tier_of, tiers, values
from jaxserve.sched.policies.slos_serve.speculation import PrefillSupply, StepCosts
from jaxserve.sched.routing.base import Fleet
from tests.support.examples import examples
from tests.support.sched.cost import calls

TOKEN = Coefficients(fixed=0, prefill=1 / 6, decode=1 / 6, quadratic=0, longest=0, context=0)  # six tokens per second
LARGE = Limits(tokens=8192, rows=256, pages=10_000, page_size=16)


def prompts(deadline: list[float], tokens: list[float], tpot: float = 1.0, pages: float = 0.0) -> Prompts:
    count = len(deadline)
    return Prompts(np.array(deadline), np.array(tokens), np.full(count, tpot), np.full(count, pages))


def terms(coefficients: Coefficients = TOKEN, margin: float = 0.0) -> StepCosts:
    return StepCosts(GeneralModel(coefficients, correct=False), 8192, 1.0, margin=margin)


@pytest.mark.parametrize(("rows", "expected"), [(3, 3), (0, 4), (1, 4), (2, 4), (4, 2), (5, 1), (6, 0), (7, 0)])
def test_figure_3(rows: int, expected: int) -> None:
    """Six tokens a unit, three decodes, four prompts of six tokens due after six units:

    36 - 18 tokens fit three prompts.
    """
    standing = Commitments(0.0, np.ones(rows), np.ones(rows), prompts([], []), 1e9)
    assert int(admitted(standing, prompts([6.0] * 4, [6.0] * 4), terms()).sum()) == expected


def line(capacity: float, tpot: list[float]) -> Callable[[Array], Array]:
    """Return PB* of a server that computes `capacity` tokens per second, one of them per row and TPOT."""

    def rate(counts: Array) -> Array:
        result: Array = capacity - counts @ (1.0 / np.array(tpot))
        return result

    return rate


def feasible(
    start: float, items: Prompts, tier: Array, taken: list[bool], counts: Array, rate: Callable[[Array], Array]
) -> bool:
    """Check by definition: at every deadline, the tokens left for prompts cover the prompts due by then."""
    at, left, now = start, 0.0, counts.copy()
    order = sorted(range(len(items)), key=lambda row: (items.deadline[row], not taken[row], row))
    for row in order:
        if not taken[row]:
            continue
        speed = float(rate(now))
        left += (items.deadline[row] - at) * speed - items.tokens[row]
        at = float(items.deadline[row])
        if speed < 0 or left < -1e-9:
            return False
        now[int(tier[row])] += 1
    return float(rate(now)) >= 0


CASE = st.tuples(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.integers(1, 30),
            st.integers(0, 1),
            st.integers(0, 4),
            st.sampled_from([False, False, False, True]),
            st.integers(-2, 2),
        ),
        min_size=1,
        max_size=7,
    ),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.sampled_from([4.0, 10.0, 25.0]),
    st.integers(0, 12),
)


@given(CASE, st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_no_set_of_more_value_exists(case, weighed: bool) -> None:  # type: ignore[no-untyped-def]
    """No feasible subset is worth more than the set found, with two tiers, forced prompts, memory and priorities.

    If all prompts have the same value, the set found is the largest.
    """
    rows, running, capacity, free = case
    items = Prompts(
        np.array([float(row[0]) for row in rows]),
        np.array([float(row[1]) for row in rows]),
        np.ones(len(rows)),
        np.array([float(row[3]) for row in rows]),
    )
    tier = np.array([row[2] for row in rows], dtype=np.intp)
    forced: Mask = np.array([row[4] for row in rows], dtype=bool)
    counts, rate = np.array(running, dtype=float), line(capacity, [1.0, 2.0])
    value = values([row[5] if weighed else 0 for row in rows])
    found = largest_set(0.0, items, tier, forced, counts, rate, float(free), value)
    if not weighed:
        assert found.tolist() == largest_set(0.0, items, tier, forced, counts, rate, float(free)).tolist()
    assert not (found & forced).any()
    all_taken = [bool(flag) for flag in found | forced]
    best = 0.0
    without = feasible(0.0, items, tier, forced.tolist(), counts, rate)
    new = np.flatnonzero(~forced).tolist()
    for flags in product([False, True], repeat=len(new)):
        taken = forced.copy()
        taken[[row for row, flag in zip(new, flags, strict=True) if flag]] = True
        if items.pages[taken & ~forced].sum() <= free and feasible(0.0, items, tier, taken.tolist(), counts, rate):
            best = max(best, float(value[taken & ~forced].sum()))
    if without:
        assert float(value[found].sum()) == best
        assert items.pages[found].sum() <= free
        assert feasible(0.0, items, tier, all_taken, counts, rate) or not found.any()


def test_more_new_prompts_than_one_lot_decides() -> None:
    """Of a hundred equal prompts due at 100, sixty fit, whatever the size of the lots, which are smaller with more
    kinds: of fourteen priorities at once ten fit, and the higher values are admitted.
    """
    standing = Commitments(0.0, np.zeros(0), np.zeros(0), prompts([], []), 1e9)
    order = np.random.default_rng(0).permutation(14)
    found = admitted(standing, prompts([100.0] * 14, [60.0] * 14, tpot=1e6), terms(), values(order.tolist()))
    assert sorted(order[found].tolist()) == list(range(10))
    found = admitted(standing, prompts([100.0] * 100, [10.0] * 100, tpot=1e6), terms())
    assert int(found.sum()) == 60 and dp.MOST < 60


def test_ten_new_beside_two_hundred_running_cost_little() -> None:
    """Bound the calls beside rows that decode and prompts under way, with two tiers, scarce memory and drafts."""
    random = np.random.default_rng(0)
    model = GeneralModel(Coefficients(8e-3, 5e-5, 2e-5, 1e-9, 1e-8, 1e-8, draft=1e-3))

    def drawn(count: int) -> Prompts:
        tpot = random.choice([0.05, 0.1], count)
        return Prompts(random.uniform(0.2, 20.0, count), random.uniform(50, 2000, count), tpot, np.full(count, 70.0))

    for rows, under_way, most in ((200, 0, 2200), (100, 100, 3000), (0, 200, 4000)):
        tpot, context = random.choice([0.05, 0.1], rows), random.uniform(100, 2000, rows)
        standing, new = Commitments(0.0, tpot, context, drawn(under_way), 400.0), drawn(10)
        admitted(standing, new, StepCosts(model, 8192, 0.3, 0.7, 4))  # the first one draws up tables
        assert calls(lambda s=standing, n=new: admitted(s, n, StepCosts(model, 8192, 0.3, 0.7, 4))) <= most


# ---- as an admission, and refusals
# -----------------------------------------------------------------------------------


def request(id: int, tokens: int, ttft: float, tpot: float = 1.0, **more: object) -> Request:
    slo = SLO(ttft=ttft, tpot=tpot, stages=more.pop("stages", ()))  # type: ignore[arg-type]
    prompt = range(1000 * id, 1000 * id + tokens)
    asked_for = NewRequest(prompt, SamplingParams(max_tokens=None), slo, tier=str(more.pop("tier", STANDARD)))
    return Request(id, asked_for, 0.0, **more)  # type: ignore[arg-type]


def scheduler(role: Role = Role.MIXED, coefficients: Coefficients = TOKEN) -> Scheduler:
    return Scheduler(Fcfs(), GeneralModel(coefficients, correct=False), LARGE, role)


def asked(server: Scheduler, one: Request) -> bool:
    return ByDP(margin=0.0, output=0).admits(one, server, 0.0)


def test_the_tightest_stage_bounds_demand() -> None:
    """Rows of 0.2 s a token take five of six tokens a second, so a second row is refused, whichever
    stage sets its TPOT.
    """
    server = scheduler()
    server.add(request(0, 1, 60.0, tpot=0.2))
    assert asked(server, request(1, 1, 60.0, tpot=2.0))
    assert not asked(server, request(1, 1, 60.0, tpot=0.2))
    thinks = request(1, 1, 60.0, tpot=2.0, stages=((THINKING, 0.2),), thinking=ThinkingEnd([(7,)]))
    assert not asked(server, thinks)
    assert not asked(server, request(1, 1, 60.0, tpot=0.2, stages=((THINKING, 2.0),), thinking=ThinkingEnd([(7,)])))


# ---- routing -------------------------------------------------------------------------------------------------------


def fleet(*servers: Scheduler) -> Fleet:
    return Fleet(0.0, servers, lambda tokens: 0.0)


def test_the_next_replica_is_asked() -> None:
    """Ask replicas in turn: the next one in turn, then those after it. If all refuse, keep the turn."""
    route = routing.make("next_replica", ByDP(margin=0.0, output=0))
    servers = [scheduler() for _ in range(3)]
    servers[1].add(request(0, 36, 6.0, tpot=1e5))
    firsts = [route.prefill(request(id, 36, 6.0, tpot=1e5), fleet(*servers))[0] for id in (1, 2, 3)]
    assert firsts == [0, 2, 2], "replica 1 has no room, so replica 2 is next"
    hopeless = request(4, 37, 6.0, tpot=1e5)
    assert route.prefill(hopeless, fleet(*servers)) == [0, 1, 2]


def test_next_replica_asks_the_dp_if_admission_is_none() -> None:
    servers = [scheduler(), scheduler()]
    servers[0].add(request(0, 36, 6.0, tpot=1e5))
    route = routing.make("next_replica", AdmitAll())
    assert route.prefill(request(1, 30, 6.0, tpot=1e5), fleet(*servers)) == [1, 0]
    late = request(2, 30, 6.0, tier=BEST_EFFORT)
    assert route.prefill(late, fleet(*servers)) == [1, 0], "best effort goes to the next replica in turn"


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 40), st.sampled_from([0.5, 1.0, 2.0]), st.integers(-1, 1)),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 3),
    st.sampled_from([1e9, 3.0]),
    st.integers(-5, 5),
)
@settings(max_examples=examples(300), deadline=None)
def test_fast_paths_and_lots_find_a_set_of_the_highest_value(
    jobs: list[tuple[int, int, float, int]], running: int, free: float, level: int
) -> None:
    """The fast paths and lots of `admitted` match the full program's value, and a common priority changes nothing."""
    deadline, tokens, tpot, priority = (list(column) for column in zip(*jobs, strict=True))
    count = len(jobs)
    new = Prompts(np.array(deadline, float), np.array(tokens, float), np.array(tpot), np.ones(count))
    standing = Commitments(0.0, np.full(running, 0.5), np.ones(running), prompts([], []), free)
    found, value = admitted(standing, new, terms(), values(priority)), values(priority)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillSupply, "uniform", lambda self, counts: False)
        whole = admitted(standing, new, terms(), value)
        assert float(value[found].sum()) == float(value[whole].sum())
    among = tiers(np.concatenate((standing.tpot, new.tpot)))
    tier = tier_of(new.tpot, among)
    counts = np.bincount(tier_of(standing.tpot, among), minlength=len(among)).astype(float)
    supply = PrefillSupply(terms(), among.tolist(), standing.load, running, float(new.tokens.mean()))
    none: Mask = np.zeros(count, dtype=bool)
    plain = largest_set(0.0, new, tier, none, counts, supply.rate, free, value)
    assert float(value[found].sum()) == float(value[plain].sum())
    alike = admitted(standing, new, terms(), values([level] * count))
    assert alike.tolist() == admitted(standing, new, terms()).tolist()


def test_a_value_is_that_of_a_priority() -> None:
    """A request is worth two of the next lower priority, and sums of values are exact."""
    assert values([0, 1, -1, 3]).tolist() == [1.0, 0.5, 2.0, 0.125]
    assert values([10_000, -10_000]).tolist() == [2.0**-dp.SPAN, 2.0**dp.SPAN]
    assert values([dp.SPAN, -dp.SPAN]).sum() - 2.0**dp.SPAN == 2.0**-dp.SPAN


@pytest.mark.parametrize("chunk", [512, 2048, 8192])
def test_padded_prompts_of_similar_size_cost_about_the_same(chunk: int) -> None:
    """Two sizes with the same padding must not make tokens free or attention expensive."""
    truth = Coefficients(fixed=10e-3, prefill=1e-4, decode=5e-5, quadratic=3e-10, longest=0, context=0)
    tokens, context = np.array([100.0, 700.0, 3000.0, 8000.0]), np.array([0.0, 4000.0, 0.0, 60_000.0])
    smooth = demand(GeneralModel(truth, correct=False), tokens, context, chunk)
    sizes = (64, 128, 512, 2048, 8192)
    stairs = demand(GeneralModel(Padded(truth, Buckets((), sizes)), correct=False), tokens, context, chunk)
    padded = np.ceil(tokens / chunk) * chunk
    assert (tokens <= stairs).all() and (stairs <= 1.5 * smooth + padded).all()
