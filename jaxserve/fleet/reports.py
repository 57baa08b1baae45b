"""Snapshots of instances as messages: what fronts route by, and the events of prefix caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from jaxserve.sched.api.perf import Array, PerfModel
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.instance.block_pool import CacheEvents
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.describe import describe, restore
from jaxserve.sched.routing.prefix_index import KEPT
from jaxserve.sched.routing.snapshot import COLUMNS, Row, Rows, Snapshot

Column = float | bytes  # a value that all rows have, or a letter of TYPES and an array of that type
TYPES: dict[str, str] = {"B": "<u1", "H": "<u2", "I": "<u4", "d": "<f8"}


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a queue."""

    count: int
    standard: int
    columns: tuple[Column, ...]


class InstanceReport(msgspec.Struct, frozen=True, array_like=True):
    """A Snapshot of an instance, and what its prefix cache gained and lost since the report before."""

    index: int
    taken: float
    role: Role
    seen_as: Role
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
    prefill: Columns
    decode: Columns
    others: tuple[Row, ...]
    perf: Any = None  # see sched/perf/describe.py; None: as before
    gained: bytes = b""  # KEPT bytes of each digest
    lost: bytes = b""
    anew: bool = False  # `gained` is the whole cache


PLAIN = (  # the fields that are equal in a Snapshot and in its report
    "taken", "role", "seen_as", "ends", "hung", "accepting", "kv_waiting", "running", "waiting", "prefill_backlog",
    "decode_context", "steps", "free_pages", "free_slots", "acceptance", "drift", "decoded", "others",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Update:
    """A report as received."""

    snapshot: Snapshot
    gained: Sequence[bytes]
    lost: Sequence[bytes]
    anew: bool


def report_of(index: int, snapshot: Snapshot, **more: Any) -> InstanceReport:
    """Return the message of a snapshot; `more` are the fields from `perf` on."""
    plain = {name: getattr(snapshot, name) for name in PLAIN}
    return InstanceReport(index, **plain, prefill=_columns(snapshot.prefill), decode=_columns(snapshot.decode), **more)


def update_of(report: InstanceReport, limits: Limits, perf: PerfModel) -> Update:
    """Return what a message tells of an instance with these limits and this step-time model."""
    plain: dict[str, Any] = {name: getattr(report, name) for name in PLAIN}
    prefill, decode = _rows(report.prefill), _rows(report.decode)
    snapshot = Snapshot(**plain, prefill=prefill, decode=decode, limits=limits, perf=perf)
    return Update(snapshot, _split(report.gained), _split(report.lost), report.anew)


def _columns(rows: Rows) -> Columns:
    count = len(rows)
    return Columns(count, rows.standard, tuple(_packed(getattr(rows, name)) for name in COLUMNS) if count else ())


def _rows(given: Columns) -> Rows:
    columns = [_unpacked(column, given.count) for column in given.columns] or [np.zeros(0)] * len(COLUMNS)
    named: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
    return Rows(**named, standard=given.standard)


def _packed(column: Array) -> Column:
    first = column.item(0)
    if (column == first).all():
        return float(first)
    whole = column.astype(np.uint32) if column.min() >= 0.0 and column.max() < 2.0**32 else None
    if whole is None or (whole != column).any():
        return b"d" + column.astype("<f8").tobytes()
    most = int(whole.max())
    letter = "B" if most < 1 << 8 else "H" if most < 1 << 16 else "I"
    return letter.encode() + whole.astype(TYPES[letter]).tobytes()


def _unpacked(column: Column, count: int) -> Array:
    if isinstance(column, float):
        return np.full(count, column)
    values: Array = np.frombuffer(column, TYPES[chr(column[0])], offset=1).astype(float)
    if len(values) != count:
        raise ValueError(f"a column has {len(values)} values for {count} rows")
    return values


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + KEPT] for at in range(0, len(digests), KEPT)]


def _joined(digests: Iterable[bytes]) -> bytes:
    return b"".join([digest[:KEPT] for digest in digests])


class Feed:
    """The reports of one instance, for all fronts. Writer: the engine's thread."""

    def __init__(self, index: int, scheduler: Scheduler) -> None:
        self._index = index
        self._scheduler = scheduler
        self._events: CacheEvents | None = None
        self._blocks = scheduler.blocks
        self._state: object = None  # of the scheduler, at the last report
        self._perf = -1  # version of the step-time model, likewise

    def follow(self, following: bool) -> None:
        """Begin or end to collect the events of the prefix cache."""
        if following is (self._events is not None):
            return
        if self._events is not None:
            self._blocks.unfollow(self._events)
        self._blocks = self._scheduler.blocks
        self._events = self._blocks.follow() if following else None
        if self._events is not None:
            self._events.take()  # those who ask from now on get the whole cache first

    def whole(self, now: float, *, cache: bool = True) -> InstanceReport:
        """Return a report for a front that knows nothing; without `cache`, it says nothing of the prefix cache."""
        scheduler = self._scheduler
        gained = _joined(scheduler.blocks.digests) if cache else b""
        perf = describe(scheduler.perf)
        return report_of(self._index, Snapshot.of(scheduler, now, identify=False), perf=perf, gained=gained, anew=cache)

    def news(self, now: float) -> InstanceReport | None:
        """Return a report for all fronts that got the one before, if something has changed since."""
        scheduler = self._scheduler
        state = (scheduler.version, scheduler.accepting, scheduler.running, scheduler.waiting, scheduler.kv_waiting)
        if state == self._state or self._events is None:
            return None
        self._state = state
        anew = scheduler.blocks is not self._blocks
        if anew:  # the pool was rebuilt after a failed step
            self.follow(False)
            self.follow(True)
        gained, lost = self._events.take()
        if anew:
            gained, lost = list(scheduler.blocks.digests), []
        perf = None
        if scheduler.perf.version != self._perf:
            self._perf, perf = scheduler.perf.version, describe(scheduler.perf)
        snapshot = Snapshot.of(scheduler, now, identify=False)
        return report_of(self._index, snapshot, perf=perf, gained=_joined(gained), lost=_joined(lost), anew=anew)


class Receiver:
    """The instances of an engine, from its reports. Writer: the front's loop."""

    def __init__(self, limits: Sequence[Limits]) -> None:
        self._limits = limits
        self._perf: dict[int, PerfModel] = {}

    def read(self, reports: Iterable[InstanceReport]) -> dict[int, Update]:
        """Return what the reports tell, by instance. Raises ValueError for an unknown instance or step-time model."""
        updates = {}
        for report in reports:
            index = report.index
            if not 0 <= index < len(self._limits) or (report.perf is None and index not in self._perf):
                raise ValueError(f"a report of instance {index} before one with its step-time model")
            if report.perf is not None:
                self._perf[index] = restore(report.perf)
            updates[index] = update_of(report, self._limits[index], self._perf[index])
        return updates
