"""Views of one instance, as policies see them."""

from __future__ import annotations

from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Limits, Policy, Role, View
from jaxserve.sched.api.request import Request, State
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.request_queues import RequestQueue
from jaxserve.sched.perf.model import Coefficients, GeneralModel


def begun(one: Request, computed: int) -> Request:
    one.state, one.computed, one.slot = State.RUNNING, computed, 0
    return one


# 1 s per 1,000 prompt tokens; a decode step takes 10 ms + 1 ms per 1,000 tokens of its longest row
PERF = GeneralModel(
    Coefficients(fixed=0.010, prefill=1e-3, decode=0.0, quadratic=0.0, longest=1e-6, context=0.0), correct=False
)


def prompt(id: int, length: int, arrival: float = 0.0, slo: SLO | None = None, tier: str = "standard") -> Request:
    return Request(id, NewRequest(range(length), SamplingParams(), slo or SLO(ttft=8.0), tier=tier), arrival)


def decoding(id: int, context: int, due: float, last: float = 0.0) -> Request:
    one = Request(id, NewRequest(range(context - 1), SamplingParams(max_tokens=1000), SLO(tpot=0.05)), 0.0)
    one.state, one.computed, one.output = State.RUNNING, context - 1, [1]
    one.first_token_at, one.token_times, one.budget = 0.0, [last], due
    return one


def view(prefill: list[Request], decode: list[Request], **more: object) -> View:
    tables = RequestQueue(), RequestQueue()
    for table, requests in zip(tables, (prefill, decode), strict=True):
        for request in requests:
            table.add(request)
    fields: dict[str, object] = {
        "now": 0.0, "start": 0.0, "role": Role.PREFILL, "limits": Limits(8192, 256, 1000, 16), "free_pages": 900,
        "free_slots": 256 - sum(one.state is State.RUNNING for one in prefill + decode), "kv_waiting": 0, "perf": PERF,
    }  # fmt: skip
    return View(prefill=tables[0], decode=tables[1], **{**fields, **more})  # type: ignore[arg-type]


def order(policy: Policy, at: View) -> list[int]:
    return [grant.request for grant in policy.decide(at).grants]
