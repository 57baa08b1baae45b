"""Speculative drafting added to any policy with one token per decode, as in `kairos/draft`.

The draft length follows from measured acceptance and predicted step time: of the available lengths,
the one with the most tokens per second (Acc(sl) / T(sl) of SLOs-Serve, arXiv 2504.08784, appendix D,
generalized to any number of rows with an acceptance each), or no drafting if that is fastest.

The policy's steps follow the drafts, as in that paper: a row that drafts and is ahead may wait as long
as the tokens of its step allow, so that prompts get longer chunks (`Paced`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, cast

import numpy as np

from ..api.acceptance import draft_lengths
from ..api.perf import Array, Load, PerfModel
from ..api.policy import Decision, Grant, Policy, QueueView, Role, View
from ..api.request import RequestView
from ..feasibility import Mask

WORTH = 1.05  # required speedup over no drafting: a smaller one is within measurement error
SHARE = 0.01  # share of the time that may go into exploring another length
LEAST, MOST = 16, 512  # steps between two explorations
AGAIN = 8  # steps with equal grants that reuse the choice not to draft: choosing takes 0.1 ms


class Paced:
    """A `QueueView` whose rows gain several tokens a step: it may take the time of all of them.

    Only if the row is so far ahead: the first of them has a deadline too.
    """

    def __init__(self, rows: QueueView, start: float, gains: Array) -> None:
        """gains [rows]: expected tokens of a step besides the first. start: when the step begins, in seconds."""
        self._rows = rows
        ahead = rows.deadline - start
        self.tpot: Array = np.clip(ahead, rows.tpot, (1.0 + gains) * rows.tpot)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._rows)

    def __getitem__(self, row: int) -> RequestView:
        return self._rows[row]


class _Best(NamedTuple):
    rate: float  # tokens per second
    draft: int
    rows: Mask  # the rows that draft


class Drafting:
    """A policy that adds drafts to the decodes that another policy grants.

    Explores an alternative now and then, because what never runs is never measured. Writer of the
    number of steps since the last exploration and of the last choice.

    adaptive: choose lengths as described above; if False, always draft as much as fits.
    """

    def __init__(self, policy: Policy, adaptive: bool = True) -> None:
        self._policy = policy
        self._adaptive = adaptive
        self._since = 0
        self._turn = False  # alternates between the two alternatives of `_tried`
        self._asked: tuple[Grant, ...] = ()  # the grants that `_lengths` was chosen for
        self._lengths: dict[int, int] = {}
        self._left = 0  # steps for which `_lengths` remains valid

    def decide(self, view: View) -> Decision:
        if view.role is Role.PREFILL or not view.limits.draft or not len(view.decode):
            return self._policy.decide(view)
        decision = self._policy.decide(self._paced(view))
        if not decision.grants:
            return decision
        self._since += 1
        self._left -= 1
        if self._left < 0 or decision.grants != self._asked:
            self._lengths = self._chosen(view, decision)
            tried = self._since == 0
            self._asked, self._left = decision.grants, 0 if self._lengths or tried else AGAIN - 1
        return _with(decision, self._lengths)

    def _paced(self, view: View) -> View:
        """Return the view with a longer TPOT for rows that draft and are ahead: their step yields several tokens."""
        if not self._lengths:
            return view
        gains = [
            sum(request.acceptance**n for n in range(1, self._lengths.get(request.id, 0) + 1))
            for request in view.decode
        ]
        return replace(view, decode=cast(QueueView, Paced(view.decode, view.start, np.array(gains))))

    def _chosen(self, view: View, decision: Decision) -> dict[int, int]:
        """Choose the number of tokens to draft, by request."""
        decoding = {request.id: row for row, request in enumerate(view.decode)}
        rows = [decoding[grant.request] for grant in decision.grants if grant.request in decoding]
        mine = [view.decode[row] for row in rows]
        if not self._adaptive and mine:
            prompts = sum(grant.tokens for grant in decision.grants if grant.request not in decoding)
            room = (view.limits.tokens - prompts) // len(mine) - 1
            return dict.fromkeys((request.id for request in mine), min(view.limits.draft, max(0, room)))
        if not any(request.drafts for request in mine):
            return {}
        batch = _Batch.of(view, mine, rows, _beside(view, decision, decoding))
        idle = _Best(batch.count / batch.alone, 0, batch.able)
        choices = [batch.best(draft, idle.rate) for draft in draft_lengths(view.limits.draft)]
        best = max((choice for choice in choices if choice is not None), key=lambda choice: choice.rate, default=idle)
        best = best if best.rate > WORTH * idle.rate else idle
        if not batch.beside.prefill:  # step times are learned from steps of decodes only
            best = self._tried(batch, best, idle)
        drafting = zip(mine, best.rows.tolist(), strict=True)
        return {request.id: best.draft for request, drafts in drafting if drafts} if best.draft else {}

    def _tried(self, batch: _Batch, best: _Best, idle: _Best) -> _Best:
        """Return `best`, or from time to time an alternative to measure, less often the more it costs.

        If not drafting is best, the alternative is one token for every row. Otherwise the alternatives
        are, in turn, no drafting and the same length for all rows, since the acceptance of a row that
        does not draft may have risen.
        """
        if self._since < LEAST:
            return best
        able, drafting = int(np.count_nonzero(batch.able)), int(np.count_nonzero(best.rows))
        other = _Best(0.0, max(1, best.draft), batch.able)
        if not best.draft:
            lost = batch.seconds(able, 1) * idle.rate / batch.count - 1.0
        elif self._turn or drafting == able:
            other, lost = idle, 1.0 - idle.rate / best.rate
        else:
            lost = batch.seconds(able, best.draft) / batch.seconds(drafting, best.draft) - 1.0
        if self._since < min(MOST, lost / SHARE):
            return best
        self._since, self._turn = 0, not self._turn
        return other


@dataclass(frozen=True)
class _Batch:
    """The decodes of one step.

    able [rows]: whether the row may draft. chance [rows]: probability that a drafted token is accepted.
    beside: the prompt chunks of the step. limit: seconds that a step with drafts may take, for the gaps of all rows and
    the TPOT of those that do not draft.
    """

    perf: PerfModel
    tokens: int  # limit of a step
    longest: int
    context: int
    able: Mask
    chance: Array
    beside: Load
    limit: float

    @classmethod
    def of(cls, view: View, mine: Sequence[RequestView], rows: Sequence[int], beside: Load) -> _Batch:
        """Build a batch from the requests `mine`, which are at `rows` of `view.decode`."""
        able = np.array([request.drafts for request in mine])
        chance = np.array([request.acceptance if request.drafts else 0.0 for request in mine])
        which = np.array(rows)
        context, tbt, tpot = view.decode.context[which], view.decode.tbt[which], view.decode.tpot[which]
        limit = min(tbt.min(), tpot.min(initial=inf, where=~able)) if beside.prefill else inf
        return cls(
            view.perf, view.limits.tokens, int(context.max()), int(context.sum()), able, chance, beside, float(limit)
        )

    @property
    def count(self) -> int:
        return len(self.able)

    @cached_property
    def alone(self) -> float:
        """Seconds of a step without drafts."""
        return self.seconds(0, 0)

    def seconds(self, drafting: int, draft: int) -> float:
        """Predict the seconds of a step in which all rows decode and `drafting` rows draft."""
        drafts = draft if drafting else 0
        load = self.beside.add_rows(self.count + drafting * draft, self.longest, self.context)._replace(drafts=drafts)
        return max(self.perf.step_time(load), 1e-9)

    def best(self, draft: int, plain: float) -> _Best | None:
        """Choose the rows that gain by drafting `draft` tokens, given the rate `plain` without drafts.

        Returns None if no row gains, or if the step has no room for the drafts.
        """
        gains = np.zeros_like(self.chance)  # expected tokens besides the one that is always gained
        for _ in range(draft):
            gains = self.chance * (1.0 + gains)
        each = (self.seconds(self.count, draft) - self.alone) / self.count
        worth = gains > max(0.0, each) * plain  # compared with the tokens that the added time costs
        drafting = int(np.count_nonzero(worth))
        if not drafting or self.beside.prefill + self.count + drafting * draft > self.tokens:
            return None
        seconds = self.seconds(drafting, draft)
        if seconds > max(self.limit, self.alone):
            return None
        return _Best((self.count + float(gains[worth].sum())) / seconds, draft, worth)


def _beside(view: View, decision: Decision, decoding: Collection[int]) -> Load:
    """Return the load of the prompt chunks that a decision grants."""
    chunks = {grant.request: grant.tokens for grant in decision.grants if grant.request not in decoding}
    load = Load()
    for request in view.prefill if chunks else ():
        tokens = chunks.pop(request.id, 0)
        if tokens:
            load = load.add_chunk(min(tokens, request.remaining), request.context)
        if not chunks:
            break
    return load


def _with(decision: Decision, lengths: dict[int, int]) -> Decision:
    if not lengths or not max(lengths.values()):
        return decision
    grants = tuple(
        Grant(grant.request, grant.tokens, grant.draft or lengths.get(grant.request, 0)) for grant in decision.grants
    )
    return replace(decision, grants=grants)
