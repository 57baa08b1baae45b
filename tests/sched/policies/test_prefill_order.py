"""Orders of prompts and rows by policy, what every order has in common, and Kairos as published."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.policy import Limits, Role, View
from jaxserve.sched.api.request import BEST_EFFORT, Request, State
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.ordered import LONG, PERIOD
from tests.support.sched.harness import Job, simulate
from tests.support.sched.views import begun, decoding, order, prompt, view

ORDERS = ("fcfs", "sjf", "edf", "deadline_edf", "sedf", "kairos", "kairos:literal", "kairos:verbatim", "flowprefill")
AGEING = ("sjf", "edf", "deadline_edf", "sedf", "kairos", "kairos:literal", "flowprefill")


def first(name: str, at: View) -> int:
    return policies.make(f"prefill={name},decode=continuous").decide(at).grants[0].request


def due(id: int, length: int, at: float, arrival: float = 0.0) -> Request:
    """Return a prompt with a first-token deadline; 1,000 tokens take a second and each step 10 ms."""
    return prompt(id, length, arrival, SLO(ttft=at - arrival))


def test_literal_kairos_counts_the_whole_prompt_for_every_chunk_and_overestimates_slack() -> None:
    """Line 22 as published makes mu a hundred times too high for a prompt of 100 chunks of 1,000 tokens.

    Two prompts that will be late then look early, and among early prompts the short one goes first.
    """
    limits = Limits(1000, 256, 10_000, 16)
    literal, verbatim = policies.make("kairos:literal"), policies.make("kairos:verbatim")
    requests = [prompt(0, 9000), prompt(1, 100)]
    for policy in (literal, verbatim):
        for _ in range(100):
            assert order(policy, view([prompt(2, 100_000)], [], limits=limits)) == [2]
    assert order(literal, view(requests, [], limits=limits)) == [0, 1]
    assert order(verbatim, view(requests, [], limits=limits)) == [1, 0]


@pytest.mark.parametrize("name", ORDERS)
def test_best_effort_comes_last_in_every_order(name: str) -> None:
    """A best-effort prompt comes last although it is the shortest, the first, and has the earliest deadline."""
    easy = prompt(0, 10, -5.0, SLO(ttft=6.0), tier=BEST_EFFORT)
    requests = [easy, prompt(1, 5000), prompt(2, 9000, -50.0)]
    granted = order(policies.make(f"prefill={name},decode=continuous"), view(requests, []))
    assert granted[:1] != [0] and 0 not in granted[:2]


@pytest.mark.parametrize("name", AGEING)
def test_the_oldest_long_prompt_has_its_share_of_the_time(name: str) -> None:
    """The oldest long prompt gets the first 2 s of every 10 s, and otherwise waits behind the short ones."""
    requests = [due(0, 500, 60.0), due(1, LONG, 70.0), due(2, LONG, 70.0), due(3, 500, 60.0)]
    best_effort = prompt(4, LONG, -1.0, tier=BEST_EFFORT)
    for start in np.arange(0.0, 3 * PERIOD, 0.5).tolist():
        at = view([*requests, best_effort], [], start=start, limits=Limits(8192, 256, 100_000, 16))
        colon = "+" if ":" in name else ":"
        assert (first(f"{name}{colon}ageing=0.2", at) == 1) == (start % PERIOD < 2.0)
        assert first(name, at) != 1


@pytest.mark.parametrize("name", ["sjf", "edf", "deadline_edf", "sedf", "kairos"])
def test_a_chunk_holds_one_prompt_or_several(name: str) -> None:
    jobs = [Job(range(1000 * i, 1000 * i + 10), 1) for i in range(4)]
    packed = simulate(jobs, policy=name, tokens=32)
    alone = simulate(jobs, policy=f"{name}:no-pack", tokens=32)
    assert [len(plan.spans) for _, plan in packed.plans] == [4, 1]
    assert [len(plan.spans) for _, plan in alone.plans] == [1] * 4


def rows(*decode: Request, **more: object) -> View:
    return view([], list(decode), role=Role.DECODE, **more)


def changed(one: Request, **fields: object) -> Request:
    for name, value in fields.items():
        setattr(one, name, value)
    return one


QUEUE = [prompt(0, 6000), *(prompt(1 + at, 100, 0.1) for at in range(3))]
TIERS = [prompt(3, 10, 2.0), prompt(1, 10, 1.0), prompt(2, 10, 0.0, tier=BEST_EFFORT)]
HIDDEN = [*(prompt(at, 10, float(at)) for at in range(8)), changed(prompt(8, 10, 8.0), state=State.RUNNING)]
LATE = [prompt(0, 9000, -20.0), prompt(1, 100, -20.0)]
LEFT = [prompt(0, 3000), prompt(1, 2000, 0.1), begun(prompt(2, 9000, 0.2), 8500)]
PARTLY = [due(0, 10, 3.0), due(2, 9000, 6.5), due(3, 10, 9.0), begun(due(4, 9000, 6.5), 8000)]
# In chunks of 10 tokens, 4,000 tokens take 8 s; n/mu with the mu of large chunks predicts 4 s.
CHUNKS = view([due(0, 4000, 7.0), due(1, 5000, 18.5)], [], limits=Limits(10, 256, 10_000, 16))
DUE = view([due(0, 10, 3.0), due(1, 10, 2.0), due(2, 9000, 6.5), due(3, 10, 9.0)], [], start=5.0)
BOTH = [prompt(0, 10)], [decoding(1, 100, due=1.0)]
# All rows: 110 ms; the short row alone: 11 ms.
SHORT, PATIENT, PRESSED = decoding(0, 1000, 0.050), decoding(1, 100_000, 0.400), decoding(1, 100_000, 0.115)
TWO = decoding(0, 1000, 0.200), decoding(1, 100_000, 0.400)
PAIR = decoding(0, 1000, 0.300, last=-0.01), decoding(1, 2000, 0.300, last=-0.01)
STRAGGLER = rows(*PAIR, decoding(2, 150_000, -1.0, last=-0.1))
STARVED = rows(*PAIR, decoding(2, 150_000, -1.0, last=-0.3))  # six times its TPOT without a token
# Rows of 1,000, 30,000 and then twenty of 31,000 tokens: the second costs more than it adds, all of them less.
RISING = rows(*(decoding(at, length, 1.0) for at, length in enumerate([1000, 30_000, *[31_000] * 20, 400_000])))
# Alone 114 ms: slack 22 ms >= 15 ms of the short row; together 118 ms: slack 18 ms, still. A margin takes it.
SLOW = GeneralModel(Coefficients(0.010, 1e-3, decode=0.004, quadratic=0.0, longest=1e-6, context=0.0))
SLACK, LESS = (rows(decoding(0, 1000, 0.300), decoding(1, 100_000, at), perf=SLOW) for at in (0.136, 0.1305))
FREE = GeneralModel(Coefficients(0.0, 1e-3, 0.0, 0.0, 0.0, 0.0), correct=False)  # a table may predict zero
CASES = {
    "fcfs: by arrival, best effort last": ("distserve", view(TIERS, []), [1, 3, 2]),
    "fcfs: a long prompt first": ("distserve", view(QUEUE, []), [0, 1, 2, 3]),
    "fcfs: a row limit hides no running prompt": (
        "distserve",
        view(HIDDEN, [], limits=Limits(8192, 2, 1000, 16)),
        [0, 1, 8],
    ),
    "sjf: by remaining tokens": ("sjf", view(LEFT, []), [2, 1, 0]),
    "edf: by deadline": ("edf", DUE, [1, 0, 2, 3]),
    "deadline_edf: past deadlines last": ("deadline_edf", DUE, [2, 3, 1, 0]),
    "sedf: prompts that will be late last": ("sedf", DUE, [3, 1, 0, 2]),
    "sedf: only remaining work counts": ("sedf", view(PARTLY, [], start=5.0), [4, 3, 0, 2]),
    "kairos: by its rate": ("kairos", CHUNKS, [0, 1]),
    "kairos: by the model": ("kairos:quadratic", CHUNKS, [1, 0]),
    "halves: prompts first where they prefill": ("distserve", view(*BOTH), [0, 1]),
    "halves: rows first where they decode": ("distserve", view(*BOTH, role=Role.DECODE), [1, 0]),
    "halves: rows first on mixed instances": ("distserve", view(*BOTH, role=Role.MIXED), [1, 0]),
    "halves: chosen apart": ("prefill=kairos,decode=continuous", rows(SHORT, PATIENT), [0, 1]),
    "kairos: a short prompt before a long one": ("kairos", view(QUEUE, []), [1, 2, 3, 0]),
    "kairos: the longest late prompt last": ("kairos", view(LATE, []), [1, 0]),
    "kairos, as printed: the longest late prompt first": ("kairos:literal", view(LATE, []), [0, 1]),
    "kairos: no objective last": ("kairos", view([prompt(0, 10, 0.0, NO_SLO), prompt(1, 9000)], []), [1, 0]),
    "kairos: the short row alone": ("kairos", rows(SHORT, PATIENT), [0]),
    "kairos: 5 ms of slack are not enough": ("kairos", rows(SHORT, PRESSED), [0, 1]),
    "kairos: all rows under KV pressure": ("kairos", rows(*TWO, kv_waiting=1), [0, 1]),
    "kairos, as printed: rows wait under KV pressure": ("kairos:literal", rows(*TWO, kv_waiting=1), [0]),
    "kairos: all rows with few pages": ("kairos", rows(*TWO, free_pages=199), [0, 1]),
    "kairos: a hopeless row excludes none": ("kairos", STRAGGLER, [0, 1]),
    "kairos, line 7: a straggler forbids all": ("kairos:literal", STRAGGLER, [0, 1, 2]),
    "kairos, line 7, verbatim": ("kairos:verbatim", STRAGGLER, [0, 1, 2]),
    "kairos, line 7, of a half": ("prefill=fcfs,decode=kairos:literal", STRAGGLER, [0, 1, 2]),
    "kairos, line 5: a step alone as the need": ("kairos:literal", SLACK, [0]),
    "kairos: the joint step, in time": ("kairos", SLACK, [0]),
    "kairos: a margin of the joint step": ("kairos:margin=0.05", SLACK, [0, 1]),
    "kairos, line 5: overlooks the joint step": ("kairos:literal", LESS, [0]),
    "kairos: the joint step, too late": ("kairos", LESS, [0, 1]),
    "kairos: the first local maximum": ("kairos:greedy", RISING, [0]),
    "kairos: the best prefix": ("kairos", RISING, list(range(22))),
    "kairos: steps that take no time": ("kairos", rows(decoding(1, 10, 1.0), decoding(2, 20, 2.0), perf=FREE), [1]),
}


@pytest.mark.parametrize(("name", "at", "expected"), CASES.values(), ids=CASES)
def test_the_order_of_a_decision(name: str, at: View, expected: list[int]) -> None:
    assert order(policies.make(name), at) == expected


def test_rows_that_cannot_be_on_time_neither_starve_nor_forbid_others() -> None:
    assert set(order(policies.make("kairos"), STARVED)) == {0, 1, 2}
    late = changed(decoding(3, 500, due=-1.0), tier=BEST_EFFORT)
    at = rows(decoding(0, 1000, due=0.3), decoding(1, 2000, due=0.3), decoding(2, 100_000, due=0.4), late)
    assert order(policies.make("kairos"), at) in ([0, 1], [0, 1, 3])
