"""Load-aware prefill deflection: prefill on a decode instance if that is better, and decode there too.

The predicted first token on a prefill instance is the rest of its running step, plus the work in
its queue, the prompt itself and the KV transfer. On a decode instance it is the time for the
prompts already there and then for the chunks of this one. Each chunk is as large as a mixed step of
`share` of the tightest TPOT (or TBT) allows beside the running decodes, and the KV of the prompt
must fit. The policies of the instances take chunks of that size (`Limits.mixed_share`).

A prompt is looked at once, when it arrives: with `faster` and `slo` it stays where it waits, also if a
decode instance could take it later, as in the paper. `dropped` looks again at every event.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..api.errors import InvalidValue
from ..api.instance_view import InstanceMemo, InstanceView
from ..api.perf import Array, Load, Number, PerfModel
from ..api.policy import MIXED_SHARE, Order
from ..api.request import Request, RequestView, State
from ..feasibility import chunk_times, decode_load, mixed_bound, on_time_set, remaining_work
from .base import Fleet, Move
from .least_work import LeastWork

PROBES = 256, 2048  # tokens: mixed step time is nearly linear in the chunk, so two points give the line


class Host(NamedTuple):
    """The state of a decode instance that matters to a deflected prompt."""

    start: float
    free: int  # free KV, in tokens
    queue: float  # prompt tokens already queued there
    bound: float  # seconds of a step with a chunk; inf without running decodes
    load: Load  # of the running decodes
    perf: PerfModel
    most: int  # most tokens per step

    def ends(self, length: Array) -> Array:
        """Predict the first-token times of prompts of these lengths, each as if it came alone."""
        tokens, context = self.queue + length, length // 2
        if self.bound == inf:
            ends = self.start + self.perf.prefill_times(tokens, np.zeros(len(tokens)), self.most)
        else:
            first, second = (chunk_times(self.perf, self.load, probe, context) for probe in PROBES)
            ends = _ends(self.start, self.bound, tokens, first, second, self.most)
        return np.where(self.free < length, inf, ends)


@dataclass(frozen=True, eq=False)
class Lost:
    """Waiting prompts outside the on-time set of a prefill instance that could be on time alone."""

    requests: list[RequestView]
    lengths: Array
    deadlines: Array


class Deflect(LeastWork):
    """A router that deflects prefills to decode instances.

    `faster`: deflect if the first token is predicted to be earlier there. `slo` (default): deflect
    only if the prefill instance would miss the TTFT and the decode instance would meet it.
    `dropped`: deflect only prompts outside the on-time set of a prefill instance that would be done
    in 0.9 of their remaining time.
    """

    deflects = True

    def __init__(
        self, faster: bool = False, slo: bool = False, dropped: bool = False, share: float = MIXED_SHARE
    ) -> None:
        if faster + slo + dropped > 1:
            raise InvalidValue("routing 'deflect' takes one of faster, slo and dropped", "routing")
        if not 0 < share <= 1:
            raise InvalidValue(f"{share=} must be more than 0 and at most 1", "routing")
        self._faster = faster
        self._dropped = dropped
        self.mixed_share = share
        self._hosts = InstanceMemo(self._host)
        self._lost = InstanceMemo(_lost)
        self._paths = Paths()
        self._predicted: float | None = None  # for the last placed request

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        usual = super().prefill(request, fleet)
        self._predicted = None
        if self._dropped or not fleet.decoders:
            return usual
        self._predicted = first = self._prefill_path(request, fleet, usual[0])
        through = first + fleet.transfer(request.prompt_length)
        due = request.arrival + request.slo.ttft
        if not self._faster and through <= due:
            return usual
        decoders = fleet.decoders
        ends = ends_on([self._hosts.of(fleet.instances[index], fleet.now) for index in decoders], request.prompt_length)
        best = int(ends.argmin())
        if ends[best] >= through or not (self._faster or ends[best] <= due):
            return usual
        self._predicted = float(ends[best])
        return [decoders[best], *usual]

    def predicted_first_token(self, request: Request) -> float | None:
        return self._predicted

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        """Return at most one move per decode instance: the first prompt that should be there.

        The move makes that queue longer than the fleet shows, so the next prompt has to wait for
        the next event.
        """
        decoders = fleet.decoders
        if not self._dropped or not decoders:
            return []
        instances, now = fleet.instances, fleet.now
        every = [(index, self._lost.of(instances[index], now)) for index in fleet.entries]
        lost = [(index, prompts) for index, prompts in every if prompts.requests]
        if not lost:
            return []
        hosts = [self._hosts.of(instances[index], now) for index in decoders]
        best, ends = self._paths.best(hosts, [prompts for _, prompts in lost])
        wanted = np.flatnonzero(ends - now <= 0.9 * (np.concatenate([prompts.deadlines for _, prompts in lost]) - now))
        if not len(wanted):
            return []
        behind = list(accumulate(len(prompts.requests) for _, prompts in lost))  # end of the prompts of each instance
        moves: list[tuple[int, Move]] = []
        for host in np.unique(best[wanted]).tolist():
            for at in wanted[best[wanted] == host].tolist():
                source, here = lost[bisect_right(behind, at)]
                request = here.requests[at - behind[bisect_right(behind, at)]]
                if request.state is State.WAITING and not request.generated:
                    moves.append((at, Move(request.id, source, decoders[host], float(ends[at]))))
                    break
        return [move for _, move in sorted(moves)]

    def _prefill_path(self, request: Request, fleet: Fleet, index: int) -> float:
        instance = fleet.instances[index]
        view = instance.view(fleet.now, max(fleet.now, instance.ends))
        new = request.prompt_length - instance.cached_tokens(request)
        queue = float(remaining_work(view, view.prefill).sum())
        own = view.perf.prefill_times(np.array([float(new)]), np.array([0.0]), view.limits.tokens)
        return view.start + queue + float(own[0])

    def _host(self, instance: InstanceView, start: float) -> Host:
        view = instance.view(start, start)
        queue = float(view.prefill.remaining.sum()) if len(view.prefill) else 0.0
        free = view.free_pages * instance.limits.page_size
        bound = mixed_bound(view, gap=self.mixed_share, share=self.mixed_share, stretch=self.mixed_share)
        return Host(start, free, queue, bound, decode_load(view.decode), view.perf, instance.limits.tokens)


def _lost(instance: InstanceView, start: float) -> Lost:
    view = instance.view(start, start)
    rows = view.prefill
    work = remaining_work(view, rows)
    able = (start + work <= rows.deadline) & (rows.best_effort == 0)
    lost = able & ~on_time_set(start, np.where(able, rows.deadline, -inf), work)
    waits = np.flatnonzero(lost & (rows.running == 0))
    return Lost([rows[row] for row in waits.tolist()], rows.length[waits], rows.deadline[waits])


def ends_on(hosts: Sequence[Host], length: int) -> Array:
    """Predict the first-token times of one prompt of this length, one per host."""
    ends = np.array([float(host.ends(np.array([float(length)]))[0]) if host.bound == inf else inf for host in hosts])
    busy = [host for host in hosts if host.bound < inf]
    if busy:
        first, second = (
            np.array([host.perf.step_time(host.load.add_chunk(probe, length // 2)) for host in busy])
            for probe in PROBES
        )
        start, free, queue, bound, most = np.array([(*host[:4], host.most) for host in busy]).T
        times = _ends(start, bound, queue + length, first, second, most)
        ends[[host.bound < inf for host in hosts]] = np.where(free < length, inf, times)
    return ends


class Paths:
    """The predicted first-token times by host and prompt length. Writer: the router that holds it.

    Recomputed only for hosts that changed, and computed for lengths that are new.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._hosts: list[Host] = []
        self._places: dict[float, int] = {}  # length -> column of `_ends`
        self._ends = np.zeros((0, 0))  # [hosts, lengths]
        self._columns: WeakKeyDictionary[Lost, Order] = WeakKeyDictionary()

    def best(self, hosts: list[Host], lost: Sequence[Lost]) -> tuple[Order, Array]:
        """Return, per prompt of `lost`, the best host (an index into `hosts`) and the first-token time there."""
        if len(hosts) != len(self._hosts) or len(self._places) > 256 + 4 * sum(
            len(prompts.requests) for prompts in lost
        ):
            self._forget()
        columns = np.concatenate([self._columns_of(prompts) for prompts in lost])
        self._update(hosts)
        best = np.argmin(self._ends, axis=0)
        ends = self._ends[best, np.arange(len(best))]
        return best[columns], ends[columns]

    def _columns_of(self, lost: Lost) -> Order:
        columns, places = self._columns.get(lost), self._places
        if columns is None:
            indices = [places.setdefault(length, len(places)) for length in lost.lengths.tolist()]
            columns = self._columns[lost] = np.array(indices, dtype=np.intp)
        return columns

    def _update(self, hosts: list[Host]) -> None:
        old, lengths = self._ends.shape[1], np.array(list(self._places))
        new = lengths[old:]
        if not old:
            self._ends = np.stack([host.ends(lengths) for host in hosts])
        else:
            if len(new) > len(hosts) // 4:
                more = np.stack([host.ends(new) for host in hosts])
            else:
                more = np.array([ends_on(hosts, int(length)) for length in new.tolist()]).reshape(-1, len(hosts)).T
            self._ends = np.concatenate([self._ends, more], axis=1) if len(new) else self._ends
            for row, (host, before) in enumerate(zip(hosts, self._hosts, strict=True)):
                if host is not before:
                    self._ends[row] = host.ends(lengths)
        self._hosts = hosts


def _ends(start: Number, bound: Number, tokens: Array, first: Array, second: Array, most: Number) -> Array:
    """Return when this many tokens are computed, in chunks that fill a step of `bound` seconds.

    `first` and `second` are the seconds of steps with as many tokens as PROBES says.
    """
    slope = (second - first) / (PROBES[1] - PROBES[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        chunk = np.minimum(np.where(slope > 0, PROBES[0] + (bound - first) / slope, most), most)
        ends: Array = np.where(chunk >= 1, start + np.ceil(tokens / chunk) * bound, inf)
    return ends
