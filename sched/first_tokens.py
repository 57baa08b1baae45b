"""When the first token of a new prompt will come out of an instance, whatever its policy."""

from __future__ import annotations

from math import ceil

import numpy as np

from .feasibility import GRID, decode_load, largest_chunk, mixed_bound, promised, remaining_work
from .policy import Role
from .request import Request
from .scheduler import Scheduler

SHARE = 0.95  # of the tightest tpot: a mixed step is taken to last that long where prompts wait
PRESSED = 1.1  # times a step of the running decodes alone, which prompts get in any case


def first_token_at(request: Request, one: Scheduler, now: float) -> float:
    """Predict when a prompt that arrives now has its first token on this instance, by the executor's clock.

    The prompts due before it go first. On an instance with running decodes prompts are computed in mixed steps, as
    long as the tightest tpot allows. Policies differ in both: this is the usual case, not a promise.
    """
    view = one.view(now, max(now, one.ends))
    rows, start = view.prefill, view.start + sum(task.seconds for task in view.suspended)
    due = request.arrival + request.slo.ttft
    before = np.flatnonzero(promised(rows, rows.deadline) <= due)
    own = request.prompt_length - min(one.cached_tokens(request), request.prompt_length - 1)
    context = request.prompt_length - own
    if view.role is Role.PREFILL or not len(view.decode):
        alone = view.perf.prefill_times(np.array([float(own)]), np.array([float(context)]), view.limits.tokens)
        return start + float(remaining_work(view, rows, rows.standard)[before].sum()) + float(alone[0])
    queued = promised(rows, rows.remaining - np.minimum(rows.hit, rows.remaining - 1))
    tokens = int(queued[before].sum()) + own
    load, most = decode_load(view.decode), max(1, view.limits.tokens - len(view.decode))
    bound = max(mixed_bound(view, SHARE, SHARE), PRESSED * view.perf.step_time(load))
    chunk = largest_chunk(view.perf.step_time, load, context, min(tokens, most), bound)
    chunk = chunk or min(tokens, most, GRID)
    steps = ceil(tokens / chunk)
    last = view.perf.step_time(load.add_chunk(tokens - (steps - 1) * chunk, context))
    return start + (steps - 1) * view.perf.step_time(load.add_chunk(chunk, context)) + last
