"""Alternation of prefill and decode steps on one instance that can preempt prefill steps.

The colocated setting of FlowPrefill (section 6.5) runs a prefill and a decode instance side by side on
the same devices. An engine here runs one step at a time, so the two alternate: a prefill step, stopped
at a segment boundary before the next token of a running decode would be late; a step of all running
decodes; the stopped step again.
"""

from __future__ import annotations

from math import inf, isfinite

import numpy as np

from ..api.perf import Load
from ..api.policy import Decision, Grant, Task, View
from ..feasibility import BEHIND, GRID, decode_load, keeps_objectives, largest_chunk, tightest_pace

LEAST = 0.25  # of the tightest time between tokens: the least that prompts get per turn, even if a decode is late
CUSHION = 0.15  # of the decode step: margin for a step that takes longer than predicted
SLIP = 0.05  # of the tightest time between tokens: margin for the host to stop one step and start another
COARSE = 0.25  # of the tightest time between tokens: the longest that stopping a prefill step may take
TICK = 1e-4  # seconds by which a timer may fire early


def pace(view: View) -> float:
    """Return the tightest time between tokens, in seconds, that a running decode was promised by TPOT or TBT.

    Returns inf without such a promise, or if alternating with the shortest turns is still too slow for
    every decode, since stopping prompts for them would gain nothing.
    """
    rows = view.decode
    tightest = tightest_pace(rows)
    if isfinite(tightest) and not keeps_objectives(
        rows, view.start, view.perf.step_time(decode_load(rows)) + LEAST * tightest
    ):
        return inf
    return tightest


def latest_start(view: View, seconds: float) -> float:
    """Return when a prefill step of `seconds` must be asked to stop so that every running decode is on time.

    A decode that is late by more than BEHIND TPOT does not hurry the others: its next token counts as
    due one TPOT after its last.
    """
    rows, tightest = view.decode, pace(view)
    if not isfinite(tightest):
        return inf
    count = rows.standard
    last = np.nan_to_num(rows.last(np.arange(count)), nan=view.start)
    tpot, due = rows.tpot[:count], rows.deadline[:count]
    due = np.where(view.start - due > BEHIND * tpot, last + tpot, due)
    due = np.minimum(due, last + rows.tbt[:count])
    own = float(view.perf.step_time(decode_load(rows)))
    reserve = (1.0 + CUSHION) * own + view.limits.stopping * seconds + SLIP * tightest
    return float(np.minimum.reduce(due)) - reserve


def stop_at(view: View, began: float, seconds: float) -> float:
    """Return when to ask a prefill step that began at `began` to stop.

    Prompts get a least share of the time, because decodes that cannot be on time would block them forever.
    """
    return max(latest_start(view, seconds), began + LEAST * pace(view))


def asked(view: View, running: Task, prompts: Decision) -> Decision:
    """Decide whether to stop the running prefill step for the decodes, given the prefill half's decision."""
    if prompts.preempt:
        return prompts
    at = stop_at(view, running.since, running.total)
    if at - view.now <= TICK:
        return Decision(demote=prompts.demote, preempt=True)
    return Decision(demote=prompts.demote, again=at)


def no_room(view: View, prompts: Decision) -> bool:
    """Return whether a step of these prompts could not be stopped because too many steps are suspended."""
    return prompts.resume is None and len(view.suspended) >= view.limits.suspended


def turn(view: View, prompts: Decision, decode: tuple[Grant, ...]) -> Decision:
    """Choose a prefill step or a decode step, as the promises to the decodes allow.

    Decodes without a promise about time take every other step.
    """
    grants = prompts.grants if prompts.resume is not None else coarse(view, prompts)
    seconds = _seconds(view, prompts.resume, grants, prompts.prompts)
    late = latest_start(view, seconds)
    tight = pace(view)
    spare = isfinite(late) and late - view.start >= LEAST * tight and not no_room(view, prompts)
    if view.decoded or spare:
        again = stop_at(view, view.start, seconds)
        if prompts.resume is not None:
            return Decision(demote=prompts.demote, resume=prompts.resume, again=again)
        return Decision(grants + decode, prompts.demote, prompts=prompts.prompts, separate=True, again=again)
    return Decision(decode + grants, prompts.demote, prompts=prompts.prompts, separate=True)


def coarse(view: View, prompts: Decision) -> tuple[Grant, ...]:
    """Cut the first prompt so that its step can be stopped within COARSE of the time between tokens.

    If no chunk is short enough, it gets a few tokens.
    """
    bound = COARSE * pace(view) / view.limits.stopping if view.limits.stopping else inf
    if not prompts.grants or not isfinite(bound):
        return prompts.grants
    first, others = prompts.grants[0], prompts.grants[1:]
    request = next(queued for queued in view.prefill if queued.id == first.request)
    left = min(first.tokens, request.remaining)
    tokens = largest_chunk(view.perf.step_time, Load(), request.context, left, bound) or min(left, GRID)
    return (Grant(first.request, tokens), *others)


def _seconds(view: View, resume: int | None, grants: tuple[Grant, ...], prompts: int) -> float:
    """Predict the seconds of a suspended step as a whole, or of a new step of these prompts."""
    if resume is not None:
        return next(task.total for task in view.suspended if task.step == resume)
    load, left = Load(), view.limits.tokens
    requests = {request.id: request for request in view.prefill}
    for grant in grants[:prompts]:
        request = requests[grant.request]
        tokens = min(grant.tokens, request.remaining, left)
        if tokens > 0:
            load, left = load.add_chunk(tokens, request.context), left - tokens
    return float(view.perf.step_time(load))
