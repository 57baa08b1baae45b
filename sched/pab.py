"""The prefill admission budget: how many more prompt tokens an instance can take in by a deadline."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .perf.model import Array, PerfModel
from .policy import Role, View

PROBE = 1000.0  # tokens of context over which a slope is taken


class Line(NamedTuple):
    """Any step-time model near one load as T = step + token*(new prompt tokens) + sum over rows (row + context*L)."""

    step: float
    token: float
    row: float
    context: float


def line(perf: PerfModel, rows: int, longest: float, prompt: int, chunk: int) -> Line:
    """Slopes for decode rows from `rows` rows on, the longest with `longest` tokens of context, and for prompt tokens
    as a prompt of `prompt` tokens has them alone in steps of `chunk`. For FairBatching's own line these are its a, b
    and c; where the longest context costs more than others, the difference is part of each step. Seconds."""
    count, total = float(max(1, rows)), longest * max(1, rows)
    base, more, further, empty = perf.decode_times(
        np.array([count, count + 1, count, 1.0]),
        np.array([longest, longest, longest, 0.0]),
        np.array([total, total, total + PROBE, 0.0]),
    ).tolist()
    row, context = max(0.0, more - base), max(0.0, (further - base) / PROBE)
    alone = float(perf.prefill_times(np.array([float(prompt)]), np.zeros(1), chunk)[0])
    token = (alone - max(0.0, empty - row)) / prompt
    return Line(max(0.0, base - count * row - total * context), max(token, 1e-12), row, context)


def prefill_budget(view: View, due: float, prompt: int = 1024) -> float:
    """Tokens of a new prompt that this instance can compute by `due` while everybody else stays in time; negative
    where it has promised more already (FairBatching, arXiv 2510.14392, section 3.4 and appendix A; PAB).

        PAB = (W - a*n - sum_i n_i*(b_dec + c*L_i)) / (b + c) - (prompt tokens still to compute)

    W is the time from when the next step can begin until `due`. Decodes are put off until their slack is used up and
    then take a step per tpot: n_i = 1 + (W - slack_i) / tpot_i for each row with 0 <= slack_i < W, late ones
    counting as 0; n is the largest n_i, at least 1. A prompt that waits decodes from its own deadline on, except on a
    prefill instance. Best effort counts for nothing. `prompt`: length at which the seconds per token are taken.
    """
    window = due - view.start
    tables = (view.decode,) if view.role is Role.PREFILL else (view.decode, view.prefill)
    context: list[Array] = []
    steps: list[Array] = []
    for rows in tables:
        slack = np.maximum(rows.deadline - view.start, 0.0)
        counted = (rows.best_effort == 0) & (slack < window)
        steps.append(1.0 + (window - slack[counted]) / rows.tpot[counted])
        held = rows.context if rows is view.decode else rows.context + rows.remaining
        context.append(held[counted])
    lengths, n = np.concatenate(context), np.concatenate(steps)
    near = line(view.perf, len(n), float(lengths.max(initial=0.0)), max(1, prompt), view.limits.tokens)
    free = window - near.step * float(n.max(initial=1.0)) - float(n @ (near.row + near.context * lengths))
    unfinished = float(view.prefill.remaining[view.prefill.best_effort == 0].sum())
    return free / (near.token + near.context) - unfinished
