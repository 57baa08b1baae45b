"""How often drafted tokens are right, as measured: of an instance, of a tier, of a request."""

from __future__ import annotations

PRIOR = 0.7  # before anything is known


class Drafts:
    """Measured acceptance of drafted tokens. Writer: the Scheduler.

    Tokens after the first wrong one tell nothing, so a draft of which `right` tokens hold is that many successes and,
    where it fell short, one failure. Older trials fade with a memory of some `memory`.
    """

    __slots__ = ("_memory", "_right", "_tried", "trials")

    def __init__(self, prior: float = PRIOR, weight: float = 10.0, memory: float = 1000.0) -> None:
        self._right = prior * weight
        self._tried = weight
        self._memory = memory
        self.trials = 0  # since the beginning

    @property
    def acceptance(self) -> float:
        return self._right / self._tried

    def count(self, drafted: int, right: int, *, cut: bool = False) -> None:
        """cut: the request ended there, so whether the next token of the draft was right is not known."""
        tried = right + (right < drafted and not cut)
        keep = max(0.0, 1.0 - tried / self._memory)
        self._right = keep * self._right + right
        self._tried = keep * self._tried + tried
        self.trials += tried


class Acceptance:
    """Of an instance: of all its drafts, and of those of each tier. Writer: the Scheduler."""

    def __init__(self) -> None:
        self.all = Drafts()
        self._tiers: dict[str, Drafts] = {}

    def of(self, tier: str) -> float:
        """What a request of the tier can expect; as all where the tier never drafted."""
        mine = self._tiers.get(tier)
        return self.all.acceptance if mine is None else mine.acceptance

    def record(self, tier: str, own: Drafts) -> Drafts:
        """A request's own record. One that never drafted expects what its tier has seen here, until it has drafted
        some dozens of tokens itself."""
        return own if own.trials else Drafts(self.of(tier), weight=24.0, memory=200.0)

    def count(self, tier: str, own: Drafts, drafted: int, right: int, *, cut: bool) -> None:
        """A draft was verified. `own`: the request's record."""
        mine = self._tiers.setdefault(tier, Drafts(self.all.acceptance))
        for one in (self.all, mine, own):
            one.count(drafted, right, cut=cut)


def draft_lengths(most: int) -> tuple[int, ...]:
    """Draft lengths worth trying, in tokens: powers of two below `most`, and `most`."""
    found = []
    length = 1
    while length < most:
        found.append(length)
        length *= 2
    return *found, most
