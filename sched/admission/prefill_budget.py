"""The prefill admission budget: how many more prompt tokens an instance can take in by a deadline."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from ..api.perf import PerfModel
from ..api.policy import Role, View
from ..feasibility import promised

PROBE = 1000.0  # tokens of context over which a slope is taken


class Line(NamedTuple):
    """Any step-time model near one load as T = step + token*(new prompt tokens) + sum over rows (row + context*L).
    For FairBatching's own line these are its a, b and c; where the longest context costs more than others, the
    difference is part of each step. Seconds."""

    step: float
    row: float
    context: float
    empty: float  # of a step in which nothing is computed

    def token(self, perf: PerfModel, prompt: int, chunk: int) -> float:
        """As a prompt of `prompt` tokens has them alone, in steps of `chunk`."""
        alone = float(perf.prefill_times(np.array([float(prompt)]), np.zeros(1), chunk)[0])
        return max((alone - self.empty) / prompt, 1e-12)


def line(perf: PerfModel, rows: int, longest: float) -> Line:
    """From `rows` decoding rows on, the longest with `longest` tokens of context."""
    count, total = float(max(1, rows)), longest * max(1, rows)
    base, more, twice, further, one = perf.decode_times(
        np.array([count, count + 1, 2 * count, count, 1.0]),
        np.array([longest, longest, longest, longest, 0.0]),
        np.array([total, total, total, total + PROBE, 0.0]),
    ).tolist()
    # where steps are padded, the next row may cost a whole stair, which so many more rows share
    row, context = max(0.0, min(more - base, (twice - base) / count)), max(0.0, (further - base) / PROBE)
    return Line(max(0.0, base - count * row - total * context), row, context, max(0.0, one - row))


class Promised:
    """What an instance has promised, as it stands in a view, and what it can still take in. Writer of the slopes that
    it has been asked for: what follows from the view alone is worked out once."""

    def __init__(self, view: View) -> None:
        tables = (view.decode,) if view.role is Role.PREFILL else (view.decode, view.prefill)
        held = [rows.context if rows is view.decode else rows.context + rows.remaining for rows in tables]
        self._start = view.start
        self._perf = view.perf
        self._chunk = view.limits.tokens
        self._held = np.concatenate([promised(rows, one) for rows, one in zip(tables, held, strict=True)])
        self._tpot = np.concatenate([promised(rows, rows.tpot) for rows in tables])
        deadline = np.concatenate([promised(rows, rows.deadline) for rows in tables])
        self._slack = np.maximum(deadline - view.start, 0.0)
        self._unfinished = float(np.add.reduce(promised(view.prefill, view.prefill.remaining)))
        self._near: dict[tuple[int, float], Line] = {}

    def budget(self, due: float, prompt: int) -> float:
        """See prefill_budget."""
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
    """Tokens of a new prompt that this instance can compute by `due` while everybody else stays in time; negative
    where it has promised more already (FairBatching, arXiv 2510.14392, section 3.4 and appendix A; PAB).

        PAB = (W - a*n - sum_i n_i*(b_dec + c*L_i)) / (b + c) - (prompt tokens still to compute)

    W is the time from when the next step can begin until `due`. Decodes are put off until their slack is used up and
    then take a step per tpot: n_i = 1 + (W - slack_i) / tpot_i for each row with 0 <= slack_i < W, late ones
    counting as 0; n is the largest n_i, at least 1. A prompt that waits decodes from its own deadline on, except on a
    prefill instance. Best effort counts for nothing. `prompt`: length at which the seconds per token are taken. inf
    where nothing is due.
    """
    return Promised(view).budget(due, prompt)
