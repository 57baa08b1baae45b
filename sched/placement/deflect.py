"""Load-aware prefill deflection: a prompt goes to a decode instance where that path is better, and its KV stays there.

The path through a prefill instance: what is left of its running step, the work of its queue, the prompt's own, the
transfer. The path through a decode instance: the prompts already there, then its own chunks, each as large as a step
of `share` of the tightest tpot (or tbt) leaves beside every resident; its KV must fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from ..errors import InvalidValue
from ..feasibility import decode_load, mixed_bound, on_time_set, remaining_work
from ..request import Request, RequestView, State
from ..scheduler import Scheduler
from . import Fleet, Move
from .least_work import LeastWork

PROBES = 256, 2048  # tokens: a mixed step's time is close to linear in the chunk, so two of them tell the rest


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
        ends, best = self._decode_paths(request, fleet)
        return [best, *usual] if ends < through and (self._faster or ends <= due) else usual

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        moves: list[Move] = []
        if self._dropped and fleet.decoders:
            for index in fleet.entries:
                moves += self._relieve(index, fleet, {move.target for move in moves})
        return moves

    def _relieve(self, index: int, fleet: Fleet, taken: set[int]) -> list[Move]:
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
            if request.state is not State.WAITING or request.generated:
                continue
            ends, best = self._decode_paths(request, fleet)
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

    def _decode_paths(self, request: RequestView, fleet: Fleet) -> tuple[float, int]:
        """The soonest predicted first token on a decode instance, and which."""
        return min((self._decode_path(request, fleet.instances[index], fleet.now), index) for index in fleet.decoders)

    def _decode_path(self, request: RequestView, one: Scheduler, now: float) -> float:
        if one.blocks.available * one.limits.page_size < request.prompt_length:
            return inf
        start = max(now, one.ends)
        view = one.view(now, start)
        queue = float(view.prefill.remaining.sum()) if len(view.prefill) else 0.0
        tokens = queue + request.prompt_length
        bound = mixed_bound(view, self._share)
        if bound == inf:
            return start + float(view.perf.prefill_times(np.array([tokens]), np.array([0.0]), view.limits.tokens)[0])
        load, context = decode_load(view.decode), request.prompt_length // 2
        first, second = (view.perf.step_time(load.add_chunk(probe, context)) for probe in PROBES)
        slope = (second - first) / (PROBES[1] - PROBES[0])
        chunk = PROBES[0] + (bound - first) / slope if slope > 0 else float(view.limits.tokens)
        chunk = min(chunk, float(view.limits.tokens))
        return start + np.ceil(tokens / chunk) * bound if chunk >= 1 else inf
