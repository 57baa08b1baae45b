"""Measured acceptance of drafted tokens: per instance, per tier and per request."""

from __future__ import annotations

PRIOR = 0.7  # assumed before anything is measured


class Drafts:
    """Acceptance of drafted tokens, as measured. Writer: the Scheduler.

    Tokens after the first rejected one say nothing, so a draft with `right` accepted tokens counts
    as `right` successes and, if it was longer, one failure. Older trials decay: the average covers
    about the last `memory` trials.
    """

    __slots__ = ("_memory", "_right", "_tried", "trials")

    def __init__(self, prior: float = PRIOR, weight: float = 10.0, memory: float = 1000.0) -> None:
        self._right = prior * weight
        self._tried = weight
        self._memory = memory
        self.trials = 0  # in total, without decay

    @property
    def acceptance(self) -> float:
        return self._right / self._tried

    def count(self, drafted: int, right: int, *, cut: bool = False) -> None:
        """Record one verified draft.

        `cut`: the request ended at the last accepted token, so the token after it was not tested.
        """
        tried = right + (right < drafted and not cut)
        keep = max(0.0, 1.0 - tried / self._memory)
        self._right = keep * self._right + right
        self._tried = keep * self._tried + tried
        self.trials += tried


class Acceptance:
    """Acceptance on one instance, over all drafts and per tier. Writer: the Scheduler."""

    def __init__(self) -> None:
        self.all = Drafts()
        self._tiers: dict[str, Drafts] = {}

    def of(self, tier: str) -> float:
        """Return the acceptance of a tier, or that of all tiers if this one has not drafted yet."""
        mine = self._tiers.get(tier)
        return self.all.acceptance if mine is None else mine.acceptance

    def record(self, tier: str, own: Drafts) -> Drafts:
        """Return the record to use for a request that arrives on this instance.

        A request that has drafted keeps its own record. Otherwise it starts from the acceptance of
        its tier here, which weighs as much as two dozen trials.
        """
        return own if own.trials else Drafts(self.of(tier), weight=24.0, memory=200.0)

    def count(self, tier: str, own: Drafts, drafted: int, right: int, *, cut: bool) -> None:
        """Record one verified draft, also in `own`, the record of its request."""
        mine = self._tiers.setdefault(tier, Drafts(self.all.acceptance))
        for record in (self.all, mine, own):
            record.count(drafted, right, cut=cut)


def draft_lengths(most: int) -> tuple[int, ...]:
    """Return the draft lengths to consider: powers of two below `most`, and `most`, in tokens."""
    lengths = []
    length = 1
    while length < most:
        lengths.append(length)
        length *= 2
    return *lengths, most
