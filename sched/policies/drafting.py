"""Any policy whose rows decode one token each, made to draft: as `kairos/draft`.

How much pays follows from what was accepted and what steps take: of the lengths that there are, the one by which the
rows that decode gain the most tokens per second (Acc(sl) / T(sl) of SLOs-Serve, arXiv 2504.08784 appendix D, for any
number of rows), each row by its own acceptance, and none where that is best. Steps with parts of prompts do not draft:
the policy has sized them for rows of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from ..perf.model import Array, Load
from ..policy import Decision, Grant, Policy, Role, View

WORTH = 1.05  # of the rate without drafts: less is within the error of what is measured
SHARE = 0.01  # of the time that may go into trying another length
LEAST, MOST = 16, 512  # steps between two tries


def lengths_of(most: int) -> tuple[int, ...]:
    """Drafted tokens to choose from: 1, 2, 4 and so on, and the most."""
    found = []
    length = 1
    while length < most:
        found.append(length)
        length *= 2
    return *found, most


class _Best(NamedTuple):
    rate: float  # tokens per second
    draft: int
    rows: Array  # which of the rows draft


class Drafting:
    """What `policy` decides, with drafts for the rows that decode. adaptive: as above; otherwise always the most.

    Writer of the count of steps since something else was tried: what is never done is never measured.
    """

    def __init__(self, policy: Policy, adaptive: bool = True) -> None:
        self._policy = policy
        self._adaptive = adaptive
        self._since = 0
        self._turn = False  # whose turn it is to be tried

    def decide(self, view: View) -> Decision:
        decision = self._policy.decide(view)
        if view.role is Role.PREFILL or not view.limits.draft or not len(view.decode) or not decision.grants:
            return decision
        rows = {one.id: row for row, one in enumerate(view.decode)}
        mine = [rows[grant.request] for grant in decision.grants if grant.request in rows]
        if not mine:
            return decision
        if not self._adaptive:
            prompts = sum(grant.tokens for grant in decision.grants if grant.request not in rows)
            room = (view.limits.tokens - prompts) // len(mine) - 1
            return _with(decision, rows, dict.fromkeys(mine, min(view.limits.draft, max(0, room))))
        if len(mine) < len(decision.grants):
            return decision
        return _with(decision, rows, self._lengths(view, mine))

    def _lengths(self, view: View, mine: Sequence[int]) -> dict[int, int]:
        """Tokens to draft by row of view.decode."""
        able = np.array([view.decode[row].drafts for row in mine])
        if not able.any():
            return {}
        chance = np.where(able, [view.decode[row].acceptance for row in mine], 0.0)
        context = view.decode.context[np.array(mine)]
        idle = _Best(len(mine) / _seconds(view, context, 0, 0), 0, able)
        found = [_best(view, chance, context, draft, idle.rate) for draft in lengths_of(view.limits.draft)]
        best = max((one for one in found if one is not None), key=lambda one: one.rate, default=idle)
        best = best if best.rate > WORTH * idle.rate else idle
        best = self._tried(view, best, idle, able, context)
        return {row: best.draft for row, drafts in zip(mine, best.rows.tolist(), strict=True) if drafts and best.draft}

    def _tried(self, view: View, best: _Best, idle: _Best, able: Array, context: Array) -> _Best:
        """Now and then something else, as seldom as what it costs asks for: one token where none is best; where some
        are, by turns none, and as many of all rows: one that was left out may have become better."""
        self._since += 1
        count, length = int(able.sum()), max(1, best.draft)
        lost = _seconds(view, context, count, length) / max(_seconds(view, context, int(best.rows.sum()), length), 1e-9)
        other, lost = _Best(0.0, length, able), lost - 1.0
        if not best.draft:
            lost = _seconds(view, context, count, 1) * idle.rate / len(context) - 1.0
        elif self._turn or best.rows.sum() == count:
            other, lost = idle, 1.0 - idle.rate / best.rate
        if self._since < min(MOST, max(LEAST, ceil(lost / SHARE))):
            return best
        self._since, self._turn = 0, not self._turn
        return other


def _best(view: View, chance: Array, context: Array, draft: int, plain: float) -> _Best | None:
    """The rows that had better draft that many tokens, and what all gain then; None where there is no room."""
    count = len(chance)
    powers = chance[:, None] ** np.arange(1, draft + 1)[None]
    gains = powers.sum(axis=1)  # tokens beyond the one that is certain
    alone, everybody = _seconds(view, context, 0, 0), _seconds(view, context, count, draft)
    worth = gains > max(0.0, everybody - alone) / count * plain  # of what its own tokens take, at the rate without
    drafting = int(worth.sum())
    if not drafting or count + drafting * draft > view.limits.tokens:
        return None
    return _Best((count + float(gains[worth].sum())) / _seconds(view, context, drafting, draft), draft, worth)


def _seconds(view: View, context: Array, drafting: int, draft: int) -> float:
    """Of a step in which all rows decode and some of them draft."""
    tokens = len(context) + drafting * draft
    load = Load(decode=tokens, longest=int(context.max()), context=int(context.sum()), drafts=draft if drafting else 0)
    return max(view.perf.step_time(load), 1e-9)


def _with(decision: Decision, rows: dict[int, int], lengths: dict[int, int]) -> Decision:
    if not lengths or not max(lengths.values()):
        return decision
    grants = tuple(
        Grant(grant.request, grant.tokens, grant.draft or lengths.get(rows.get(grant.request, -1), 0))
        for grant in decision.grants
    )
    return replace(decision, grants=grants)
