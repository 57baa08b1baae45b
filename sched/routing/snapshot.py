"""Immutable snapshots of instances: what a router sees of instances that run elsewhere or were seen earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, nan

import numpy as np

from ..api.acceptance import PRIOR
from ..api.instance_view import InstanceView
from ..api.new_request import STANDARD
from ..api.perf import Array, PerfModel
from ..api.policy import Limits, Order, QueueView, Role, View
from ..api.request import BEST_EFFORT, Request, RequestView, State, tightest
from ..api.slo import ANSWER, SLO

COPIED = ("ttft", "tbt", "tpot", "tightest", "deadline", "remaining", "context", "length", "running", "hit")
COLUMNS = (*COPIED, "id", "generated")
UNKNOWN = -1  # id of a request in a snapshot that does not identify its requests


@dataclass(frozen=True, slots=True)
class Row:
    """A request in a snapshot. A `RequestView`; what no router reads is left at its default."""

    id: int
    ttft: float
    tpot: float
    tbt: float  # inf for none
    tier: str
    state: State
    prompt_length: int
    computed: int
    remaining: int
    generated: int
    deadline: float
    drafting: int = 0
    arrival: float = nan
    priority: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    acceptance: float = PRIOR
    drafts: bool = False
    stage: str = ANSWER
    drops: int = 0
    held: bool = False

    @property
    def best_effort(self) -> int:
        return int(self.tier == BEST_EFFORT)

    @property
    def context(self) -> int:
        return self.computed

    @property
    def slo(self) -> SLO:
        return SLO(self.ttft, self.tpot, self.tbt if self.tbt < inf else None)

    @classmethod
    def of(cls, request: RequestView) -> Row:
        """Return a copy of a request. Its tpot is the least one of its stage and those to come."""
        slo = request.slo
        tpot, tbt = tightest(request, slo.tpot_of(request.stage)), inf if slo.tbt is None else slo.tbt
        return cls(
            request.id, slo.ttft, tpot, tbt, request.tier, request.state, request.prompt_length, request.computed,
            request.remaining, request.generated, request.deadline, request.drafting, held=request.held,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Copied columns of a queue. A `QueueView` without what no router reads: weights, arrivals, last tokens."""

    ttft: Array
    tbt: Array
    tpot: Array
    tightest: Array
    deadline: Array
    remaining: Array
    context: Array
    length: Array
    running: Array
    hit: Array
    id: Array
    generated: Array
    standard: int
    version: int = 0
    members: int = 0

    @classmethod
    def of(cls, rows: QueueView, identify: bool) -> Rows:
        """Copy a queue; without `identify`, its requests have no ids, and those that decode one token each."""
        columns: dict[str, Array] = {name: getattr(rows, name).copy() for name in COPIED}
        count = len(rows)
        if identify:
            ids, generated = [float(row.id) for row in rows], [float(row.generated) for row in rows]
        else:
            ids, generated = [float(UNKNOWN)] * count, [0.0] * count
        own = {"id": np.array(ids, dtype=float), "generated": np.array(generated, dtype=float)}
        return cls(**columns, **own, standard=rows.standard, version=rows.version, members=rows.members)

    def __len__(self) -> int:
        return len(self.deadline)

    def __iter__(self) -> Iterator[RequestView]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> RequestView:
        return Row(
            int(self.id.item(row)),
            self.ttft.item(row),
            self.tpot.item(row),
            self.tbt.item(row),
            STANDARD if row < self.standard else BEST_EFFORT,
            State.RUNNING if self.running.item(row) else State.WAITING,
            int(self.length.item(row)),
            int(self.context.item(row)),
            int(self.remaining.item(row)),
            int(self.generated.item(row)),
            self.deadline.item(row),
        )

    @property
    def best_effort(self) -> Array:
        return (np.arange(len(self)) >= self.standard).astype(float)

    @property
    def arrival(self) -> Array:
        return np.full(len(self), nan)

    @property
    def weight(self) -> Array:
        return np.full(len(self), nan)

    def last(self, order: Order) -> Array:
        return np.full(len(order), nan)

    def plus(self, requests: Sequence[Request], hits: Sequence[int]) -> Rows:
        """Return these rows and waiting requests behind them, before best effort unless they are best effort."""
        own = [pair for pair in zip(requests, hits, strict=True) if pair[0].tier != BEST_EFFORT]
        last = [pair for pair in zip(requests, hits, strict=True) if pair[0].tier == BEST_EFFORT]
        places = [self.standard] * len(own) + [len(self)] * len(last)
        new = np.array([_waiting(request, hit) for request, hit in own + last]).T
        columns = {name: np.insert(getattr(self, name), places, new[at]) for at, name in enumerate(COLUMNS)}
        return Rows(**columns, standard=self.standard + len(own), version=self.version, members=self.members)


def _waiting(request: Request, hit: int) -> tuple[float, ...]:
    """Return the columns of a request that waits."""
    slo, tpot = request.slo, request.slo.tpot_of(request.stage)
    tbt = inf if slo.tbt is None else slo.tbt
    return (
        slo.ttft, tbt, tpot, tightest(request, tpot), request.deadline, request.remaining, 0, request.prompt_length,
        0, hit, request.id, request.generated,
    )  # fmt: skip


def nothing_cached(request: Request) -> int:
    """Return 0, the hit of any request where nothing is known of a prefix cache."""
    return 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """An InstanceView of plain values, as of the time `taken`. Suspended steps are not in it.

    `perf` and `hits`, which looks up prompt tokens in the prefix cache, may be newer.
    """

    taken: float  # seconds, on the clock of all times in it
    role: Role
    seen_as: Role  # by its policy
    limits: Limits
    perf: PerfModel
    ends: float
    hung: bool
    accepting: bool
    kv_waiting: int
    running: int
    waiting: int
    prefill_backlog: int
    decode_context: int
    steps: int
    free_pages: int
    free_slots: int
    acceptance: float
    drift: float
    decoded: bool
    prefill: Rows
    decode: Rows
    others: tuple[Row, ...] = ()  # requests in neither queue, such as those with a draft in flight
    hits: Callable[[Request], int] = nothing_cached

    @classmethod
    def of(cls, instance: InstanceView, now: float, *, identify: bool = True) -> Snapshot:
        """Return a snapshot of an instance.

        `identify`: with the ids of its requests, and with all of them; otherwise only those whose number
        or length matters to a router, which takes less time.
        """
        view = instance.view(now, max(now, instance.ends))
        prefill, decode = (Rows.of(rows, identify) for rows in (view.prefill, view.decode))
        others: tuple[Row, ...] = ()
        if identify and len(instance) > len(prefill) + len(decode):
            queued = {*prefill.id.tolist(), *decode.id.tolist()}
            others = tuple(Row.of(request) for request in instance if request.id not in queued)
        elif view.limits.draft:
            others = tuple(Row.of(request) for request in instance if request.drafting)
        return cls(
            now, instance.role, view.role, view.limits, view.perf, instance.ends, instance.hung, instance.accepting,
            instance.kv_waiting, instance.running, instance.waiting, instance.prefill_backlog,
            instance.decode_context, instance.steps, view.free_pages, view.free_slots, view.acceptance, view.drift,
            view.decoded, prefill, decode, others, instance.cached_tokens,
        )  # fmt: skip

    @property
    def version(self) -> int:
        """A number that changes when `view` changes other than by time: with the step-time model, if that is newer."""
        return self.perf.version

    def __len__(self) -> int:
        return self.running + self.waiting

    def __iter__(self) -> Iterator[RequestView]:
        return chain(self.prefill, self.decode, self.others)

    def cached_tokens(self, request: Request) -> int:
        return self.hits(request)

    def view(self, now: float, start: float) -> View:
        return View(
            now, start, self.seen_as, self.prefill, self.decode, self.limits, self.free_pages, self.free_slots,
            self.kv_waiting, self.perf, acceptance=self.acceptance, drift=self.drift, decoded=self.decoded,
        )  # fmt: skip

    def plus(self, requests: Sequence[Request]) -> Snapshot:
        """Return this snapshot as if these requests, which were sent later, already waited on the instance."""
        if not requests:
            return self
        hits = [self.hits(request) for request in requests]
        return replace(
            self,
            waiting=self.waiting + len(requests),
            prefill_backlog=self.prefill_backlog + sum(request.remaining for request in requests) - sum(hits),
            prefill=self.prefill.plus(requests, hits),
        )

    def later(self, seconds: float) -> Snapshot:
        """Return this snapshot with all times moved by `seconds`, to the clock of another process."""
        rows = [replace(queue, deadline=queue.deadline + seconds) for queue in (self.prefill, self.decode)]
        return replace(
            self, taken=self.taken + seconds, ends=self.ends + seconds, prefill=rows[0], decode=rows[1],
            others=tuple(replace(other, deadline=other.deadline + seconds) for other in self.others),
        )  # fmt: skip
