"""What each instance can still take: what autoscalers, gateways and people look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from jaxserve.sched.admission.prefill_budget import Promised
from jaxserve.sched.api.metric import GAUGE, gauge, row
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.cluster.first_tokens import waits
from jaxserve.sched.cluster.ttft_predictions import TTFTPredictions
from jaxserve.sched.feasibility import remaining_work
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.instance.slack import least_slack

REFERENCE = 1024  # tokens of the prompt that budgets and predicted first tokens are for
SALT = b"reference"  # no prefix in a cache has it


@dataclass(frozen=True, slots=True)
class Headroom:
    """A snapshot of one instance. Infinite where nothing limits it."""

    budget: Mapping[str, float] = row(
        GAUGE,
        "prefill_budget_tokens",
        "Prompt tokens that the instance can take within the TTFT of the class (PAB), negative if overcommitted.",
        {"label": "slo_class"},
        default_factory=dict,
    )
    slack: float = gauge(
        "instance_slack_seconds", "Time by which no next token of the instance would be late.", default=inf
    )
    queue: float = gauge("prefill_queue_seconds", "Predicted time of the prompts that are still to be computed.")
    ttft: float = gauge(
        "instance_predicted_ttft_seconds",
        f"Predicted time to first token of a prompt of {REFERENCE} tokens that arrives now.",
    )


def headroom(
    scheduler: Scheduler, now: float, predictions: TTFTPredictions, default: SLO, classes: Mapping[str, SLO]
) -> Headroom:
    """Return what an instance can still take. Call it on the thread of the scheduler.

    `default`: objectives of the prompt whose first token is predicted. `classes`: those that the prefill
    admission budget is for; classes without a TTFT have none.
    """
    start = max(now, scheduler.ends)
    view = scheduler.view(now, start)
    promised = Promised(view)
    budget = {name: promised.budget(now + slo.ttft, REFERENCE) for name, slo in classes.items() if slo.ttft < inf}
    prompt = Request(-1, NewRequest((0,) * REFERENCE, SamplingParams(), default, salt=SALT), now)
    queue = float(np.add.reduce(remaining_work(view, view.prefill))) if len(view.prefill) else 0.0
    predicted = predictions.predict(prompt, scheduler.role, waits(prompt, scheduler, now))
    return Headroom(budget, least_slack([(start, scheduler)]), queue, predicted)
