"""Prediction of the time of the first token of a new prompt, whatever the policy.

The prompt may have to wait for several kinds of work. How much of each it does wait for is learned.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from ..api.instance_view import InstanceView
from ..api.policy import Role
from ..api.request import Request
from ..feasibility import GRID, PRESSED, SHARE, decode_load, largest_chunk, mixed_bound, promised, remaining_work
from ..perf.recursive import Recursive

BEFOREHAND = (1.0, 1.0, 1.0, 0.0, 1.0, 0.0)  # prior shares of the waits, and prior seconds of host time
SURE = 3.0  # weight of the prior, in requests
FORGETTING = 0.98  # halves the weight of a request after 34 others
FAR = 1.5  # ratio of measured to predicted time beyond which an error is clipped
LEAST = 1e-4  # seconds: lower bound of a prediction, as a divisor


class Waits(NamedTuple):
    """Seconds that a new prompt may have to wait, by kind of work.

    `begun`: running and suspended steps. `ahead`: waiting prompts due before it. `late`: waiting
    prompts due before it that will be late in any case. `others`: the other waiting prompts. `own`:
    its own steps.
    """

    begun: float = 0.0
    ahead: float = 0.0
    late: float = 0.0
    others: float = 0.0
    own: float = 0.0


def waits(request: Request, instance: InstanceView, now: float) -> Waits:
    """Return what a prompt that arrives now on this instance may have to wait for.

    On an instance with running decodes, prompts are computed in mixed steps as long as the tightest
    tpot allows. Policies differ in this and in their order; `Shares` learns the difference.
    """
    view = instance.view(now, max(now, instance.ends))
    rows, begun = view.prefill, view.start - now + sum(task.seconds for task in view.suspended)
    work, deadline = remaining_work(view, rows, rows.standard), promised(rows, rows.deadline)
    before = deadline <= request.arrival + request.slo.ttft
    late = before & (view.start + work > deadline)
    own = request.prompt_length - min(instance.cached_tokens(request), request.prompt_length - 1)
    context = request.prompt_length - own
    if view.role is Role.PREFILL or not len(view.decode):
        alone = view.perf.prefill_times(np.array([float(own)]), np.array([float(context)]), view.limits.tokens)
        ahead, lost = float(work[before & ~late].sum()), float(work[late].sum())
        return Waits(begun, ahead, lost, float(work[~before].sum()), float(alone[0]))
    queued = promised(rows, rows.remaining - np.minimum(rows.hit, rows.remaining - 1))
    load, most = decode_load(view.decode), max(1, view.limits.tokens - len(view.decode))
    bound = max(mixed_bound(view, gap=SHARE, share=SHARE, stretch=SHARE), PRESSED * view.perf.step_time(load))
    tokens = own + int(queued.sum())
    chunk = largest_chunk(view.perf.step_time, load, context, min(tokens, most), bound) or min(tokens, most, GRID)
    each = view.perf.step_time(load.add_chunk(chunk, context))

    def seconds(tokens: int) -> float:
        steps = ceil(tokens / chunk)
        return (steps - 1) * each + view.perf.step_time(load.add_chunk(tokens - (steps - 1) * chunk, context))

    ends = [seconds(own)]
    for some in (before & ~late, late, ~before):  # add each kind of work in turn
        own += int(queued[some].sum())
        ends.append(max(ends[-1], seconds(own)))
    ahead, lost, others = (after - until for until, after in pairwise(ends))
    return Waits(begun, ahead, lost, others, ends[0])


class Shares:
    """The learned share of each kind of wait that a first token does wait for. Writer: TTFTPredictions.

    It reflects the policy, such as stopping running steps or serving in order of arrival, and the
    overhead of the host. Fitted by least squares of the relative error, with forgetting and clipped
    errors.
    """

    def __init__(self) -> None:
        self._learning = Recursive(np.array(BEFOREHAND), FORGETTING)
        self._learning.know(np.sqrt(SURE) * np.eye(len(BEFOREHAND)))

    def seconds(self, waits: Waits) -> float:
        """Predict the seconds until the first token."""
        return float(self._learning.weights @ np.array((*waits, 1.0)))

    def learn(self, waits: Waits, seconds: float) -> None:
        """Learn from a first token that came after this many seconds."""
        row, predicted = np.array((*waits, 1.0)), max(self.seconds(waits), LEAST)
        self._learning.update(row / predicted, min(max(seconds / predicted, 1 / FAR), FAR))
