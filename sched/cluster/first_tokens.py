"""When the first token of a new prompt will come out of an instance, whatever its policy: what it may have to wait for,
and how much of that counts, which is learned."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from ..api.instance_view import InstanceView
from ..api.policy import Role
from ..api.request import Request
from ..feasibility import GRID, decode_load, largest_chunk, mixed_bound, promised, remaining_work
from ..perf.recursive import Recursive

SHARE = 0.95  # of the tightest tpot: a mixed step is taken to last that long where prompts wait
PRESSED = 1.1  # times a step of the running decodes alone, which prompts get in any case
BEFOREHAND = (1.0, 1.0, 1.0, 0.0, 1.0, 0.0)  # shares of the waits, and seconds of the host, before anything is known
SURE = 3.0  # requests that this counts as
FORGETTING = 0.98  # a request counts half after 34 others
FAR = 1.5  # times as long or as short as predicted that a first token may be, to count in full
LEAST = 1e-4  # seconds


class Waits(NamedTuple):
    """Seconds that a new prompt may have to wait: for steps that run or were stopped, for prompts that are due before
    it, for those of them that will be late in any case, for the other prompts that wait, and for its own steps."""

    begun: float = 0.0
    ahead: float = 0.0
    late: float = 0.0
    others: float = 0.0
    own: float = 0.0


def waits(request: Request, one: InstanceView, now: float) -> Waits:
    """Of a prompt that arrives now on this instance.

    On an instance with running decodes prompts are computed in mixed steps, as long as the tightest tpot allows.
    Policies differ in that, and in whom they serve first: see `Shares`.
    """
    view = one.view(now, max(now, one.ends))
    rows, begun = view.prefill, view.start - now + sum(task.seconds for task in view.suspended)
    work, deadline = remaining_work(view, rows, rows.standard), promised(rows, rows.deadline)
    before = deadline <= request.arrival + request.slo.ttft
    late = before & (view.start + work > deadline)
    own = request.prompt_length - min(one.cached_tokens(request), request.prompt_length - 1)
    context = request.prompt_length - own
    if view.role is Role.PREFILL or not len(view.decode):
        alone = view.perf.prefill_times(np.array([float(own)]), np.array([float(context)]), view.limits.tokens)
        ahead, lost = float(work[before & ~late].sum()), float(work[late].sum())
        return Waits(begun, ahead, lost, float(work[~before].sum()), float(alone[0]))
    queued = promised(rows, rows.remaining - np.minimum(rows.hit, rows.remaining - 1))
    load, most = decode_load(view.decode), max(1, view.limits.tokens - len(view.decode))
    bound = max(mixed_bound(view, SHARE, SHARE), PRESSED * view.perf.step_time(load))
    tokens = own + int(queued.sum())
    chunk = largest_chunk(view.perf.step_time, load, context, min(tokens, most), bound) or min(tokens, most, GRID)
    each = view.perf.step_time(load.add_chunk(chunk, context))

    def seconds(tokens: int) -> float:
        steps = ceil(tokens / chunk)
        return (steps - 1) * each + view.perf.step_time(load.add_chunk(tokens - (steps - 1) * chunk, context))

    ends = [seconds(own)]
    for some in (before & ~late, late, ~before):  # one after the other
        own += int(queued[some].sum())
        ends.append(max(ends[-1], seconds(own)))
    ahead, lost, others = (after - until for until, after in pairwise(ends))
    return Waits(begun, ahead, lost, others, ends[0])


class Shares:
    """How much of its waits a first token waits, by what came of earlier ones: a policy that stops running steps, or
    serves in order of arrival, shows in it, and so does what the host adds.

    Least squares of the relative error with forgetting; a first token that comes far off counts as less far off.
    Writer: TTFTPredictions.
    """

    def __init__(self) -> None:
        self._learning = Recursive(np.array(BEFOREHAND), FORGETTING)
        self._learning.know(np.sqrt(SURE) * np.eye(len(BEFOREHAND)))

    def seconds(self, waits: Waits) -> float:
        """Predicted until the first token."""
        return float(self._learning.weights @ np.array((*waits, 1.0)))

    def learn(self, waits: Waits, seconds: float) -> None:
        """From a first token that came after so many seconds."""
        row, predicted = np.array((*waits, 1.0)), max(self.seconds(waits), LEAST)
        self._learning.update(row / predicted, min(max(seconds / predicted, 1 / FAR), FAR))
