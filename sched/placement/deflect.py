"""Load-aware prefill deflection: a prompt goes to a decode instance where that path is better, and its KV stays there.

The path through a prefill instance: what is left of its running step, the work of its queue, the prompt's own, the
transfer. The path through a decode instance: the prompts already there, then its own chunks, each as large as a step
of `share` of the tightest tpot (or tbt) leaves beside every resident; its KV must fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from ..errors import InvalidValue
from ..feasibility import decode_load, mixed_bound, on_time_set, remaining_work
from ..perf.model import Load, PerfModel
from ..request import Request, RequestView, State
from ..scheduler import Scheduler
from . import Fleet, Move
from .least_work import LeastWork

PROBES = 256, 2048  # tokens: a mixed step's time is close to linear in the chunk, so two of them tell the rest


class Host(NamedTuple):
    """What a decode instance would be to any prompt."""

    where: int  # in fleet.instances
    start: float
    free: int  # tokens of KV
    queue: float  # prompt tokens that are there already
    bound: float  # seconds of a step with a chunk; inf where nobody decodes
    load: Load  # of the rows that decode
    perf: PerfModel
    one: Scheduler


class Deflect(LeastWork):
    """faster: deflect where the decode path is predicted to give the first token sooner. slo: only where the prefill
    path would miss the SLO and the decode path would keep it. dropped: only what lost its place in a prefill
    instance's on-time set, and would be done in 0.9 of its time left. Without an option: slo."""

    def __init__(self, faster: bool = False, slo: bool = False, dropped: bool = False, share: float = 0.75) -> None:
        if faster + slo + dropped > 1:
            raise InvalidValue("placement 'deflect' takes one of faster, slo and dropped", "placement")
        if not 0 < share <= 1:
            raise InvalidValue(f"{share=} must be more than 0 and at most 1", "placement")
        self._faster = faster
        self._dropped = dropped
        self._share = share

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        usual = super().prefill(request, fleet)
        if self._dropped or not fleet.decoders:
            return usual
        through = self._prefill_path(request, fleet, usual[0])
        due = request.arrival + request.slo.ttft
        if not self._faster and through <= due:
            return usual
        ends, best = min(self._decode_paths(request, self._hosts(fleet)))
        return [best, *usual] if ends < through and (self._faster or ends <= due) else usual

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        moves: list[Move] = []
        if self._dropped and fleet.decoders:
            hosts = self._hosts(fleet)
            for index in fleet.entries:
                moves += self._relieve(index, fleet, hosts, {move.target for move in moves})
        return moves

    def _relieve(self, index: int, fleet: Fleet, hosts: Sequence[Host], taken: set[int]) -> list[Move]:
        """Prompts that wait here, could be on time alone, and cannot together with those that keep their place."""
        one = fleet.instances[index]
        view = one.view(fleet.now, max(fleet.now, one.ends))
        rows = view.prefill
        work = remaining_work(view, rows)
        able = (view.start + work <= rows.deadline) & (rows.best_effort == 0)
        lost = able & ~on_time_set(view.start, np.where(able, rows.deadline, -inf), work)
        moves = []
        for row in np.flatnonzero(lost).tolist():
            request = rows[row]
            if len(taken) == len(hosts):
                break
            if request.state is not State.WAITING or request.generated:
                continue
            ends, best = min(self._decode_paths(request, hosts))
            if best not in taken and ends - fleet.now <= 0.9 * (request.deadline - fleet.now):
                taken.add(best)  # its queue is longer than this fleet shows: the next event sees it
                moves.append(Move(request.id, index, best))
        return moves

    def _prefill_path(self, request: Request, fleet: Fleet, index: int) -> float:
        one = fleet.instances[index]
        view = one.view(fleet.now, max(fleet.now, one.ends))
        new = request.prompt_length - one.cached_tokens(request)
        queue = float(remaining_work(view, view.prefill).sum())
        own = view.perf.prefill_times(np.array([float(new)]), np.array([0.0]), view.limits.tokens)
        return view.start + queue + float(own[0]) + fleet.transfer(request.prompt_length)

    def _hosts(self, fleet: Fleet) -> list[Host]:
        """The decode instances: what does not depend on the request, worked out once for all that ask."""
        return [self._host(index, fleet.instances[index], fleet.now) for index in fleet.decoders]

    def _host(self, index: int, one: Scheduler, now: float) -> Host:
        view = one.view(now, max(now, one.ends))
        queue = float(view.prefill.remaining.sum()) if len(view.prefill) else 0.0
        free = one.blocks.available * one.limits.page_size
        return Host(
            index,
            view.start,
            free,
            queue,
            mixed_bound(view, self._share, self._share),
            decode_load(view.decode),
            view.perf,
            one,
        )

    @staticmethod
    def _decode_paths(request: RequestView, hosts: Sequence[Host]) -> Iterator[tuple[float, int]]:
        """The predicted first token on each decode instance, and which."""
        length = request.prompt_length
        context = length // 2
        for index, start, free, queue, bound, load, perf, one in hosts:
            tokens, most = queue + length, one.limits.tokens
            if free < length:
                yield inf, index
            elif bound == inf:
                yield start + float(perf.prefill_times(np.array([tokens]), np.array([0.0]), most)[0]), index
            else:
                first, second = (perf.step_time(load.add_chunk(probe, context)) for probe in PROBES)
                slope = (second - first) / (PROBES[1] - PROBES[0])
                chunk = PROBES[0] + (bound - first) / slope if slope > 0 else float(most)
                chunk = min(chunk, float(most))
                yield (start + ceil(tokens / chunk) * bound if chunk >= 1 else inf), index
