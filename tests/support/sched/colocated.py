"""Views of one colocated instance."""

from __future__ import annotations

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role, View
from jaxserve.sched.api.request import Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from tests.support.sched import views

# 10 ms + 0.1 ms per prompt token + 1 ms per row, whatever the contexts; in FLAT, contexts cost 10 us a token
EXACT = Coefficients(fixed=0.010, prefill=1e-4, decode=1e-3, quadratic=0.0, longest=0.0, context=0.0)
PERF = GeneralModel(EXACT, correct=False)
STEEP = GeneralModel(Coefficients(0.010, 1e-4, 1e-3, 0.0, 1e-5, 1e-5), correct=False)


def prompt(id: int, tokens: int, due: float = 8.0, tier: str = "standard", runs: bool = False) -> Request:
    one = Request(id, NewRequest(range(tokens), SamplingParams(), SLO(ttft=8.0), tier=tier), due - 8.0)
    one.state = State.RUNNING if runs else State.WAITING
    return one


def decoding(id: int, due: float, context: int = 100, tier: str = "standard", first: float = 0.0) -> Request:
    one = Request(
        id, NewRequest(range(context), SamplingParams(max_tokens=1000), SLO(ttft=1.0, tpot=0.05), tier=tier), 0.0
    )
    one.state, one.computed, one.output = State.RUNNING, context, [1]
    one.first_token_at, one.token_times, one.budget = first, [first], due - first
    return one


def view(prefill: list[Request], decode: list[Request], **more: object) -> View:
    return views.view(prefill, decode, **{"role": Role.MIXED, "perf": PERF, **more})
