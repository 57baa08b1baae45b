"""A router over instances in other processes: snapshots, corrected by what was sent since, and a shortlist."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from ..api.policy import Order, Role
from ..api.request import Request
from ..feasibility import decode_load, tightest_pace
from .base import Fleet, Router, Scalars
from .prefix_index import Hits, PrefixIndex
from .snapshot import Snapshot

SHORTLIST = 16  # instances whose queues a router looks at
CACHED = 2  # of them: at most those with the longest prefix hits
DRAWN = 2  # entries among which one of several fronts chooses
BUSIEST = 0.95  # most of the time that decodes are assumed to take from prompts
ENTRY, COLUMNS = 0, 8  # the row of `Front._table` that says which instances take prompts; the number of rows


class Front:
    """What one process knows of all instances, and the router that it asks. Writer: its owner.

    Instances are numbered over all groups. Requests decode within the group of the instance that
    computed their prompt, so each entry of a group also shows its share of the group's decodes.

    From more than `shortlist` entries, the router only sees the best ones by its own estimate from
    numbers of the instances (`Router.estimate`), and those with the longest prefix hits.

    Several fronts do not see each other's requests. If all chose the best entry, all would choose the
    same one, so each draws two entries for each request, and chooses among them and those with the
    longest prefix hits.
    """

    def __init__(
        self,
        router: Router,
        groups: Sequence[int],
        page_size: int = 0,
        shortlist: int = SHORTLIST,
        fronts: int = 1,
        seed: int = 0,
    ) -> None:
        """`groups`: their numbers of instances. `page_size`: of the prefix caches that are indexed; 0: none are.

        `fronts`: that route to these instances; `seed`: of what this one draws.
        """
        ends = np.add.accumulate([0, *groups]).tolist()
        self._groups = [range(begin, end) for begin, end in pairwise(ends)]
        self._group = [at for at, group in enumerate(self._groups) for _ in group]
        self._router = router
        self._shortlist = shortlist
        self._fronts = fronts
        self._random = np.random.default_rng(seed)
        self._caches = PrefixIndex(page_size, ends[-1]) if page_size else None
        self._taken: list[Snapshot | None] = [None] * ends[-1]
        self._sent: list[dict[float, Request]] = [{} for _ in self._group]  # by mark
        self._shown: list[Snapshot | None] = [None] * ends[-1]  # with what was sent since
        self._since: list[list[Request]] = [[] for _ in self._group]  # sent, not in `_shown` yet
        self._table = np.zeros((COLUMNS, ends[-1]))

    def group(self, index: int) -> int:
        """Return the group of an instance."""
        return self._group[index]

    def instances(self, group: int) -> range:
        """Return the instances of a group."""
        return self._groups[group]

    def instance(self, index: int) -> Snapshot | None:
        """Return an instance as the router sees it; None if nothing is known of it."""
        self._show_sent()
        return self._shown[index]

    # what is known

    def update(self, group: int, snapshots: Mapping[int, Snapshot], mark: float) -> None:
        """Use newer snapshots of instances of a group.

        They show the requests that were `sent` to the group with a mark of up to `mark`.
        """
        for index, snapshot in snapshots.items():
            self._taken[index] = snapshot if self._caches is None else replace(snapshot, hits=self._hits_on(index))
        for index in self._groups[group]:
            left = self._sent[index]
            if left:
                self._sent[index] = {at: request for at, request in left.items() if at > mark}
        self._refresh(self._groups[group])

    def caches(self, index: int, gained: Sequence[bytes], lost: Sequence[bytes], anew: bool = False) -> None:
        """Apply events of the prefix cache of an instance; `anew`: it had nothing before."""
        if self._caches is not None:
            if anew:
                self._caches.clear(index)
            self._caches.update(index, gained, lost)

    def sent(self, index: int, request: Request, mark: float) -> None:
        """Count a request that was sent to an instance, until a snapshot shows it. Marks of a group ascend."""
        self._sent[index][mark] = request
        self._since[index].append(request)

    def _show_sent(self) -> None:
        """Add to what is shown what was sent since. Done when it is asked for: many requests may be sent before."""
        for index, since in enumerate(self._since):
            shown = self._shown[index]
            if since and shown is not None:
                self._show(index, shown.plus(since))
            self._since[index] = []

    def forget(self, group: int) -> None:
        """Forget a group that is lost, until there are new snapshots."""
        for index in self._groups[group]:
            self._taken[index] = self._shown[index] = None
            self._sent[index] = {}
            self._table[:, index] = 0.0
            self.caches(index, (), (), anew=True)

    def _hits_on(self, index: int) -> Callable[[Request], int]:
        caches = self._caches
        assert caches is not None
        return lambda request: int(caches.hits(request)[index])

    def _refresh(self, group: range) -> None:
        """Show the snapshots of a group with what was sent since."""
        known = [(index, snapshot) for index in group if (snapshot := self._taken[index]) is not None]
        decoders = [decoder for _, decoder in known if decoder.role is Role.DECODE]
        entries = max(1, len(known) - len(decoders))
        running, context = (
            sum(getattr(decoder, name) for decoder in decoders) // entries for name in ("running", "decode_context")
        )
        for index, snapshot in known:
            if decoders and snapshot.role is not Role.DECODE:
                snapshot = replace(
                    snapshot, running=snapshot.running + running, decode_context=snapshot.decode_context + context
                )
            self._show(index, snapshot.plus(list(self._sent[index].values())))

    def _show(self, index: int, snapshot: Snapshot) -> None:
        self._shown[index], self._since[index] = snapshot, []
        self._table[:, index] = (
            snapshot.role is not Role.DECODE and snapshot.accepting,
            snapshot.ends,
            snapshot.prefill_backlog,
            snapshot.perf.prefill_rate,
            busy(snapshot),
            snapshot.running,
            snapshot.waiting,
            snapshot.decode_context,
        )

    # routing

    def choose(self, request: Request, now: float, without: Collection[int] = ()) -> int | None:
        """Return the instance for the prompt of a request; None if no instance accepts it.

        `without`: groups that get no requests.
        """
        able = self._table[ENTRY] > 0.0
        for group in without:
            able[self._groups[group].start : self._groups[group].stop] = False
        entries = np.flatnonzero(able)
        if not len(entries):
            return None
        if len(able) == 1:
            return 0
        self._show_sent()
        listed = self._listed(request, now, entries)
        decoders = self._decoders(without) if self._router.deflects else []
        places = sorted({*listed.tolist(), *decoders})
        ranked = self._router.prefill(request, self._fleet(places, now))
        return places[ranked[0]]

    def longer_hit(self, request: Request, index: int) -> tuple[int, int] | None:
        """Return the instance with the longest prefix of a request in its cache, and the tokens of that prefix.

        None if no instance of another group has more of it than those of the group of instance `index`.
        """
        hits, own = self._hits(request), self._groups[self._group[index]]
        best = int(hits.argmax())
        return (best, int(hits[best])) if hits[best] > hits[own.start : own.stop].max() else None

    def _fleet(self, places: Sequence[int], now: float) -> Fleet:
        shown: list[Any] = [self._shown[index] for index in places]
        return Fleet(now, shown, _no_transfer, shows_sent=True)

    def _listed(self, request: Request, now: float, entries: Order) -> Order:
        """Return the entries that the router sees."""
        if self._fronts > 1:
            entries = self._drawn(request, entries)
        if len(entries) <= self._shortlist:
            return entries
        hits = self._hits(request)
        estimate = self._router.estimate(request, self._scalars(now, entries, hits))
        if estimate is None:
            return entries
        best = np.argpartition(estimate, self._shortlist - CACHED - 1)[: self._shortlist - CACHED]
        longest = np.argpartition(-hits[entries], CACHED - 1)[:CACHED]
        return entries[np.union1d(best, longest)]

    def _drawn(self, request: Request, entries: Order) -> Order:
        """Return the entries that one of several fronts sees: random ones, and the longest prefix hits."""
        if len(entries) <= DRAWN:
            return entries
        hits = self._hits(request)[entries]
        longest = np.argpartition(-hits, CACHED - 1)[:CACHED]
        drawn: Order = np.union1d(
            self._random.choice(entries, DRAWN, replace=False), entries[longest[hits[longest] > 0]]
        )
        return drawn

    def _hits(self, request: Request) -> Hits:
        """Return the prompt tokens of a request that each instance has cached."""
        caches = self._caches
        return np.zeros(len(self._shown), dtype=np.int64) if caches is None else caches.hits(request)

    def _scalars(self, now: float, entries: Order, hits: Hits) -> Scalars:
        _, ends, backlog, rate, share, running, waiting, context = self._table[:, entries]
        begun, cached = np.maximum(ends - now, 0.0), hits[entries].astype(float)
        return Scalars(begun, backlog, rate, share, running, waiting, context, cached)

    def _decoders(self, without: Collection[int]) -> list[int]:
        """Return the decode instances with the least context."""
        shown = [
            (snapshot.decode_context, index)
            for index, snapshot in enumerate(self._shown)
            if snapshot is not None
            and snapshot.role is Role.DECODE
            and snapshot.accepting
            and self._group[index] not in without
        ]
        return [index for _, index in sorted(shown)[: self._shortlist]]


def busy(snapshot: Snapshot) -> float:
    """Return the share of the time that steps of the decodes alone take, if each just keeps the tightest objective."""
    rows = snapshot.decode
    if not len(rows):
        return 0.0
    pace = tightest_pace(rows)
    return min(snapshot.perf.step_time(decode_load(rows)) / pace, BUSIEST) if pace < inf else 0.0


def _no_transfer(tokens: int) -> float:
    return 0.0
