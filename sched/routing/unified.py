"""Requests wait where they can be on time: who loses a place in one instance's on-time set may have one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf

import numpy as np

from ..api.instance_view import InstanceView
from ..api.perf import Load, PerfModel
from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request, RequestView, State
from ..feasibility import (
    deadlines,
    decode_load,
    joined,
    mixed_bound,
    on_time_set,
    piggyback_speed,
    promised,
    remaining_work,
    tightest_tpot,
    with_prompt,
)
from ..policies.unified import GAP, SHARE, SLOWEST, SOON, STRETCH
from .base import Fleet, Move, Router
from .role_balancer import FULL, QUIET, RoleBalancer

SURE = 0.9  # of the time left: what ends soon is as certain as that
LATELY = 20.0  # seconds


class Unified(Router):
    """Prompts come to the instance that is predicted to have them done first. Where not all that wait there can be on
    time, the longest prompt that another instance is predicted to finish in `margin` of its time left goes there
    instead, until all can. On a decode instance it has what steps of `share` of the tightest tpot leave; none where
    prompts already wait for pages, or nearly all rows are taken.

    What is far off is uncertain (others will come there), so that a prompt moves only where `margin` of its time left
    is enough; what takes less than `SOON` may take `SURE` of it. early: prompts are moved while there is still this
    share of their time left, not when the last of it is about to go. Who cannot be on time where it waits goes wherever
    it still can be. change_roles: see role_balancer.py. decode_in_place: see the method.
    """

    def __init__(
        self,
        margin: float = 0.2,
        share: float = SHARE,
        stretch: float = STRETCH,
        early: float = 0.5,
        change_roles: bool = True,
        decode_in_place: bool = True,
    ) -> None:
        self._margin = margin
        self._early = early
        self._share = share
        self._stretch = stretch
        self._change_roles = change_roles
        self._decode_in_place = decode_in_place
        self._seen: dict[int, tuple[int, int]] = {}  # instance -> how far it was when last looked at
        self._offered = _Lately()
        self._role_balancer = RoleBalancer(share)

    def roles(self, fleet: Fleet) -> Mapping[int, Role]:
        return self._role_balancer.roles(fleet, self._offered.at(fleet.now)) if self._change_roles else {}

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        entries = fleet.entries
        hits = {index: _hit(request, fleet.instances[index]) for index in entries}
        work = {index: _prompt_time(request, fleet.instances[index], hit) for index, hit in hits.items()}

        def done(index: int) -> tuple[float, int, int]:
            ends = self._server(index, fleet).ends(request, hits[index], work[index])
            return ends, fleet.instances[index].decode_context, index

        order = sorted(entries, key=done) if len(entries) > 1 else entries
        self._offered.add(work[order[0]], fleet.now)
        return order

    def decode_in_place(self, request: Request, index: int, fleet: Fleet) -> bool:
        """A request decodes where its prompt was computed, until there is room elsewhere, where prompts take little of
        the time, one like it finds a step of all rows there, itself among them, that it can wait for, and such a step
        and a prompt after it keep the tpot."""
        if request.tier == BEST_EFFORT or not self._quiet(fleet):
            return False
        one = fleet.instances[index]
        rows = one.view(fleet.now, max(fleet.now, one.ends)).decode
        load = joined(decode_load(rows), np.array([float(request.prompt_length + request.generated)]))
        step, prompt = one.perf.step_time(load), _prompt_time(request, one, _hit(request, one))
        tpot = min(tightest_tpot(rows), request.tpot)
        return step + prompt <= min(request.slo.ttft, self._share * tpot)

    def decode_priority(self, request: Request, fleet: Fleet) -> float:
        """Where rows are kept the longest of them leaves before anybody who waits, who can be kept instead: a step of
        short contexts has more rows."""
        if request.decodes_in_place and self._quiet(fleet):
            return -float(request.computed)
        return float(request.decodes_in_place)

    def _quiet(self, fleet: Fleet) -> bool:
        """Whether prompts took little of the time lately, so that rows may decode where prompts come to."""
        return self._decode_in_place and self._offered.at(fleet.now) <= QUIET * len(fleet.entries)

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        moves: list[Move] = []
        for index in fleet.entries:
            one = fleet.instances[index]
            seen = (len(one), one.steps)
            if self._seen.get(index) != seen:  # nothing came, ended or moved on otherwise
                self._seen[index] = seen
                moves += self._relieve(index, one, fleet)
        return moves

    def _relieve(self, index: int, one: InstanceView, fleet: Fleet) -> list[Move]:
        view = one.view(fleet.now, max(fleet.now, one.ends))
        rows = view.prefill
        if not len(rows):
            return []
        work, due = remaining_work(view, rows), deadlines(rows)
        able = view.start + work <= due
        soon = view.start + self._early * (due - view.start)
        soon = np.where(able & (view.start + work > soon), due, soon)
        lost = np.flatnonzero(~able & (due > fleet.now))
        full = on_time_set(view.start, soon, work).sum() < able.sum()
        if not full and not len(lost):
            return []
        servers = [
            self._server(other, fleet)
            for other, instance in enumerate(fleet.instances)
            if other != index
            and not (instance.hung or instance.kv_waiting)
            and instance.running < FULL * instance.limits.rows
        ]
        moves: list[Move] = []

        def moved(row: int, sure: float) -> bool:
            request, left = rows[row], float(due[row]) - fleet.now
            if request.state is not State.WAITING or request.generated:
                return False
            for server in sorted(servers, key=lambda one: (one.free, one.speed)):
                ends = server.ends(request, int(rows.hit[row]), float(work[row]))
                if ends - fleet.now <= max(self._margin * left, min(SOON, sure * left)):
                    moves.append(Move(request.id, index, server.index, ends))
                    server.free = max(server.free, ends)
                    server.join(request, int(rows.hit[row]))
                    able[row], soon[row] = False, -np.inf
                    return True
            return False

        for row in lost[np.argsort(work[lost], kind="stable")].tolist():
            moved(row, 1.0)
        if full:
            for row in np.argsort(-work, kind="stable").tolist():
                if able[row] and moved(row, SURE) and on_time_set(view.start, soon, work).sum() == able.sum():
                    break
        return moves

    def _server(self, index: int, fleet: Fleet) -> _Server:
        one = fleet.instances[index]
        view = one.view(fleet.now, max(fleet.now, one.ends))
        rows = view.prefill
        waiting = float(promised(rows, remaining_work(view, rows)).sum())
        if one.role is not Role.DECODE or not len(view.decode):
            return _Server(index, view.perf, view.start, view.start + waiting, 1.0)
        bound = mixed_bound(view, self._share, self._stretch, gap=GAP)
        speed = piggyback_speed(view, bound)
        free = view.start + (waiting / speed if speed > SLOWEST else inf)
        server = _Server(index, view.perf, view.start, free, speed, decode_load(view.decode), bound)
        for row in range(rows.standard):
            if not server.join(rows[row], int(rows.hit[row])):
                break
        return server


@dataclass(slots=True)
class _Lately:
    """Seconds of prompts that came, per second of the last LATELY. Writer: `Unified.prefill`."""

    share: float = 0.0
    since: float = 0.0

    def at(self, now: float) -> float:
        return self.share * exp((self.since - now) / LATELY)

    def add(self, seconds: float, now: float) -> None:
        self.share, self.since = self.at(now) + seconds / LATELY, now


def _hit(request: Request, one: InstanceView) -> int:
    """Tokens of a prompt that an instance need not compute."""
    return min(one.cached_tokens(request), request.prompt_length - 1)


def _prompt_time(request: Request, one: InstanceView, hit: int) -> float:
    """Seconds that an instance takes for a prompt alone, after its prefix hit."""
    left, before = np.array([float(request.prompt_length - hit)]), np.array([float(hit)])
    return float(one.perf.prefill_times(left, before, one.limits.tokens)[0])


@dataclass(slots=True)
class _Server:
    """What an instance can do for a prompt that comes now. Writer: `_relieve`."""

    index: int
    perf: PerfModel
    start: float  # of its next step
    free: float  # when those who wait there are done
    speed: float  # of its own, where prompts need several steps
    load: Load | None = None  # of its next step with all who wait; None where it cannot have them all
    bound: float = 0.0  # seconds that this step may take

    def ends(self, request: RequestView, hit: int, work: float) -> float:
        """When a prompt is done that takes so many seconds alone."""
        if self.load is not None:
            seconds = self.perf.step_time(with_prompt(self.load, request, hit))
            if seconds <= self.bound:
                return self.start + seconds
        return self.free + work / self.speed if self.speed > SLOWEST else inf

    def join(self, request: RequestView, hit: int) -> bool:
        """Whether a prompt that is there shares the next step with those before it."""
        if self.load is not None:
            load = with_prompt(self.load, request, hit)
            self.load = load if self.perf.step_time(load) <= self.bound else None
        return self.load is not None
