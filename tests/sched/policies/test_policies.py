"""Orders of decisions on small views: FCFS and deadlines, Kairos as published and as corrected, and halves."""

from __future__ import annotations

import pytest

from jaxserve.sched import policies
from jaxserve.sched.api.policy import Limits, Role, View
from jaxserve.sched.api.request import BEST_EFFORT, Request, State
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from tests.support.sched.views import begun, decoding, order, prompt, view


def rows(*decode: Request, **more: object) -> View:
    return view([], list(decode), role=Role.DECODE, **more)


def due(id: int, length: int, at: float) -> Request:
    """Return a prompt with a first-token deadline; 1,000 tokens take a second and each step 10 ms."""
    return prompt(id, length, 0.0, SLO(ttft=at))


def changed(one: Request, **fields: object) -> Request:
    for name, value in fields.items():
        setattr(one, name, value)
    return one


QUEUE = [prompt(0, 6000), *(prompt(1 + at, 100, 0.1) for at in range(3))]
TIERS = [prompt(3, 10, 2.0), prompt(1, 10, 1.0), prompt(2, 10, 0.0, tier=BEST_EFFORT)]
HIDDEN = [*(prompt(at, 10, float(at)) for at in range(8)), changed(prompt(8, 10, 8.0), state=State.RUNNING)]
LATE = [prompt(0, 9000, -20.0), prompt(1, 100, -20.0)]
LEFT = [prompt(0, 3000), prompt(1, 2000, 0.1), begun(prompt(2, 9000, 0.2), 8500)]
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
ORDERS = {
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


@pytest.mark.parametrize(("name", "at", "expected"), ORDERS.values(), ids=ORDERS)
def test_the_order_of_a_decision(name: str, at: View, expected: list[int]) -> None:
    assert order(policies.make(name), at) == expected


def test_rows_that_cannot_be_on_time_neither_starve_nor_forbid_others() -> None:
    assert set(order(policies.make("kairos"), STARVED)) == {0, 1, 2}
    late = changed(decoding(3, 500, due=-1.0), tier=BEST_EFFORT)
    at = rows(decoding(0, 1000, due=0.3), decoding(1, 2000, due=0.3), decoding(2, 100_000, due=0.4), late)
    assert order(policies.make("kairos"), at) in ([0, 1], [0, 1, 3])
