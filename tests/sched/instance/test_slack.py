"""The slack of instances: the least of their requests that have objectives and are not late."""

from __future__ import annotations

from math import inf

import pytest

from jaxserve.sched.api.new_request import STANDARD, NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.instance.slack import UNPROMISED, least_slack


def request(slo: SLO, tier: str = STANDARD) -> Request:
    return Request(1, NewRequest((5,), SamplingParams(), slo, tier=tier), 10.0)


def test_slack_is_the_least_of_the_running_requests():
    early, late, free = request(SLO(ttft=4.0)), request(SLO(ttft=0.5)), request(NO_SLO, tier=BEST_EFFORT)
    assert least_slack([(12.0, [early, late, free])]) == UNPROMISED
    assert least_slack([(12.0, [early])]) == pytest.approx(2.0)
    assert least_slack([(12.0, [early]), (13.0, [early])]) == pytest.approx(1.0)
    assert least_slack([(12.0, [late, free]), (12.0, [])]) == UNPROMISED
    assert least_slack([(12.0, [request(NO_SLO)])]) == UNPROMISED, (
        "running requests without objectives still must not stall for long"
    )
    assert least_slack([(12.0, []), (12.0, [])]) == inf
