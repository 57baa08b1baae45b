"""What each instance can still take: what autoscalers, gateways and people look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from jaxserve.engine.runtime.gc_control import least_slack
from jaxserve.sched.admission.prefill_budget import Promised
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.cluster.first_tokens import waits
from jaxserve.sched.cluster.ttft_predictions import TTFTPredictions
from jaxserve.sched.feasibility import remaining_work
from jaxserve.sched.instance.scheduler import Scheduler

REFERENCE = 1024  # tokens of the prompt that budgets and predicted first tokens are for
SALT = b"reference"  # no prefix in a cache has it


@dataclass(frozen=True, slots=True)
class Headroom:
    """A snapshot of one instance. Infinite where nothing limits it."""

    budget: Mapping[str, float] = field(default_factory=dict)  # PAB by class, tokens; negative if overcommitted
    slack: float = inf  # seconds by which its next tokens could come later without any of them being late
    queue: float = 0.0  # seconds of prefill that wait
    ttft: float = 0.0  # predicted seconds to the first token of a prompt of REFERENCE tokens


def headroom(
    one: Scheduler, now: float, predictions: TTFTPredictions, default: SLO, classes: Mapping[str, SLO]
) -> Headroom:
    """Return what an instance can still take. Call it on the thread of the scheduler.

    `default`: objectives of the prompt whose first token is predicted. `classes`: those that the prefill
    admission budget is for; classes without a TTFT have none.
    """
    start = max(now, one.ends)
    view = one.view(now, start)
    promised = Promised(view)
    budget = {name: promised.budget(now + slo.ttft, REFERENCE) for name, slo in classes.items() if slo.ttft < inf}
    prompt = Request(-1, (0,) * REFERENCE, SamplingParams(), default, now, salt=SALT)
    queue = float(np.add.reduce(remaining_work(view, view.prefill))) if len(view.prefill) else 0.0
    predicted = predictions.predict(prompt, one.role, waits(prompt, one, now))
    return Headroom(budget, least_slack([(start, one)]), queue, predicted)
