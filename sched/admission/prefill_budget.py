"""The prefill admission budget: how many more prompt tokens an instance can take in by a deadline."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from ..api.instance_view import InstanceView
from ..api.perf import PerfModel
from ..api.policy import Role, View
from ..api.request import Request
from ..feasibility import promised

PROBE = 1000.0  # context tokens over which a slope is measured


class Line(NamedTuple):
    """A step-time model linearized near one load, in seconds.

    T = step + token * (new prompt tokens) + sum over decodes of (row + context * L)

    For FairBatching's own model these are its a, b and c. If the longest context costs more than
    the others, the difference is part of `step`.
    """

    step: float
    row: float
    context: float
    empty: float  # time of an empty step

    def token(self, perf: PerfModel, prompt: int, chunk: int) -> float:
        """Return the seconds per token of a prompt of `prompt` tokens that runs alone, in chunks of `chunk`."""
        alone = float(perf.prefill_times(np.array([float(prompt)]), np.zeros(1), chunk)[0])
        return max((alone - self.empty) / prompt, 1e-12)


def line(perf: PerfModel, rows: int, longest: float) -> Line:
    """Linearize the model at `rows` running decodes, of which the longest has `longest` tokens of context."""
    count, total = float(max(1, rows)), longest * max(1, rows)
    base, more, twice, further, single = perf.decode_times(
        np.array([count, count + 1, 2 * count, count, 1.0]),
        np.array([longest, longest, longest, longest, 0.0]),
        np.array([total, total, total, total + PROBE, 0.0]),
    ).tolist()
    # if steps are padded, one more row may cost as much as the next `count` rows together
    row, context = max(0.0, min(more - base, (twice - base) / count)), max(0.0, (further - base) / PROBE)
    return Line(max(0.0, base - count * row - total * context), row, context, max(0.0, single - row))


def idle_budget(perf: PerfModel, window: float, prompt: int, chunk: int) -> float:
    """Return the budget of an instance without requests for prompts due in `window` seconds; see `prefill_budget`."""
    near = line(perf, 0, 0.0)
    return (window - near.step) / (near.token(perf, prompt, chunk) + near.context)


class Promised:
    """What an instance has promised in a view, and what it can still take. Writer of its memo of slopes.

    What follows from the view alone is computed once.
    """

    def __init__(self, view: View) -> None:
        tables = (view.decode,) if view.role is Role.PREFILL else (view.decode, view.prefill)
        held = [rows.context if rows is view.decode else rows.context + rows.remaining for rows in tables]
        self._start = view.start
        self._perf = view.perf
        self._chunk = view.limits.tokens
        self._held = np.concatenate([promised(rows, column) for rows, column in zip(tables, held, strict=True)])
        self._tpot = np.concatenate([promised(rows, rows.tpot) for rows in tables])
        deadline = np.concatenate([promised(rows, rows.deadline) for rows in tables])
        self._slack = np.maximum(deadline - view.start, 0.0)
        self._unfinished = float(np.add.reduce(promised(view.prefill, view.prefill.remaining)))
        self._near: dict[tuple[int, float], Line] = {}

    def budget(self, due: float, prompt: int) -> float:
        """Return the budget; see `prefill_budget`."""
        if due == inf:
            return inf
        window, count, longest, most, spent = due - self._start, 0, 0.0, 1.0, 0.0
        counted = np.flatnonzero(self._slack < window)
        if len(counted):
            lengths = self._held[counted]
            n = 1.0 + (window - self._slack[counted]) / self._tpot[counted]
            count, longest, most = len(n), float(np.maximum.reduce(lengths)), float(np.maximum.reduce(n))
        near = self._near.get((count, longest))
        if near is None:
            near = self._near[count, longest] = line(self._perf, count, longest)
        if len(counted):
            spent = float(n @ (near.row + near.context * lengths))
        token = near.token(self._perf, max(1, prompt), self._chunk)
        return (window - near.step * most - spent) / (token + near.context) - self._unfinished


def prefill_budget(view: View, due: float, prompt: int = 1024) -> float:
    """Return how many tokens of a new prompt fit by `due` with all promises kept; negative if overcommitted.

    This is the prefill admission budget (PAB) of FairBatching (arXiv 2510.14392, section 3.4 and
    appendix A):

        PAB = (W - a*n - sum_i n_i*(b_dec + c*L_i)) / (b + c) - (prompt tokens still to compute)

    W is the time from the start of the next step until `due`. Decodes wait until their slack is
    used up and then take a step per tpot. So a row with slack below W takes n_i = 1 + (W - slack_i)
    / tpot_i steps, with slack 0 for late rows; n is the largest n_i, at least 1. Waiting prompts
    decode from their deadline on, except on a prefill instance. Best effort is ignored. `prompt` is
    the prompt length at which the seconds per token are measured. Returns inf if `due` is inf.
    """
    return Promised(view).budget(due, prompt)


class ByPrefillBudget:
    """An admission control that admits prompts within the prefill admission budget of their instance.

    The prompt counts without its prefix hit, and the budget is for its own TTFT. `refuse`: refuse
    the others, so that they can go elsewhere, instead of making them best effort.
    """

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse

    def admits(self, request: Request, instance: InstanceView, now: float) -> bool:
        new = request.prompt_length - instance.cached_tokens(request)
        return new <= prefill_budget(instance.view(now, max(now, instance.ends)), request.deadline, new)
