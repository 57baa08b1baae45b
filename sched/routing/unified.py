"""Place prompts where they finish first, and move waiting prompts that would miss their TTFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf

import numpy as np

from ..api.instance_view import InstanceView
from ..api.perf import Load, PerfModel
from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request, RequestView, State, tightest
from ..feasibility import (
    SHARE,
    deadlines,
    decode_load,
    joined,
    mixed_bound,
    on_time_set,
    piggyback_speed,
    promised,
    remaining_work,
    tightest_pace,
    with_prompt,
)
from ..policies.unified import GAP, SLOWEST, SOON, STRETCH
from .base import Fleet, Move, Router
from .role_balancer import FULL, QUIET, RoleBalancer

SURE = 0.9  # share of the time left that a move may take if it ends within SOON
LATELY = 20.0  # seconds over which the offered load is averaged


class Unified(Router):
    """A router that places each prompt where it is predicted to finish first, and moves prompts that would be late.

    If an instance cannot finish all its waiting prompts on time, the longest prompt that another
    instance is predicted to finish in `move_share` of its remaining time moves there, until the others
    are on time. Distant predictions are uncertain, because more prompts will arrive there; hence
    `move_share`. A move that takes less than `SOON` may take `SURE` of the remaining time. A prompt
    that cannot be on time where it waits moves to an instance that can still meet its TTFT.

    A decode instance computes prompts in what steps of `share` of the tightest tpot or tbt leave beside
    its decodes, and takes none while prompts wait for its pages or nearly all its slots are taken.

    `early`: move prompts while this share of their remaining time is left, not at the last moment.
    `change_roles`: see role_balancer.py. `decode_in_place`: see the method.
    """

    def __init__(
        self,
        move_share: float = 0.2,
        share: float = SHARE,
        stretch: float = STRETCH,
        early: float = 0.5,
        change_roles: bool = True,
        decode_in_place: bool = True,
    ) -> None:
        self._move_share = move_share
        self._early = early
        self._share = share
        self._stretch = stretch
        self._change_roles = change_roles
        self._decode_in_place = decode_in_place
        self._seen: dict[int, tuple[int, int]] = {}  # instance -> its state when last examined
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
        """Return whether the request decodes where its prompt was computed, until there is room elsewhere.

        It does if prompts take little of the time, a step of all decodes there plus a prompt like
        this one fits its TTFT, and the same sum fits `share` of the tightest tpot or tbt.
        """
        if request.tier == BEST_EFFORT or not self._quiet(fleet):
            return False
        one = fleet.instances[index]
        rows = one.view(fleet.now, max(fleet.now, one.ends)).decode
        load = joined(decode_load(rows), np.array([float(request.prompt_length + request.generated)]))
        step, prompt = one.perf.step_time(load), _prompt_time(request, one, _hit(request, one))
        pace = min(tightest_pace(rows), tightest(request, request.tpot))
        return step + prompt <= min(request.slo.ttft, self._share * pace)

    def decode_priority(self, request: Request, fleet: Fleet) -> float:
        """Return the rank of a request that waits for room to decode.

        While requests decode in place, the longest of them goes first, since waiting ones can
        decode in place instead, and steps of short contexts have room for more requests.
        """
        if request.decodes_in_place and self._quiet(fleet):
            return -float(request.computed)
        return float(request.decodes_in_place)

    def _quiet(self, fleet: Fleet) -> bool:
        """Return whether prefills took little of the time lately, so that decodes may stay on prefill instances."""
        return self._decode_in_place and self._offered.at(fleet.now) <= QUIET * len(fleet.entries)

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        moves: list[Move] = []
        for index in fleet.entries:
            one = fleet.instances[index]
            seen = (len(one), one.steps)
            if self._seen.get(index) != seen:  # skip instances without an arrival, an end or a step
                self._seen[index] = seen
                moves += self._relieve(index, one, fleet)
        return moves

    def _relieve(self, index: int, one: InstanceView, fleet: Fleet) -> list[Move]:
        """Return moves of waiting prompts that free this instance of late first tokens."""
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
            and instance.accepting
            and not instance.kv_waiting
            and instance.running < FULL * instance.limits.rows
        ]
        moves: list[Move] = []

        def moved(row: int, sure: float) -> bool:
            request, left = rows[row], float(due[row]) - fleet.now
            if request.state is not State.WAITING or request.generated:
                return False
            for server in sorted(servers, key=lambda one: (one.free, one.speed)):
                ends = server.ends(request, int(rows.hit[row]), float(work[row]))
                if ends - fleet.now <= max(self._move_share * left, min(SOON, sure * left)):
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
        bound = mixed_bound(view, GAP, self._share, self._stretch)
        speed = piggyback_speed(view, bound)
        free = view.start + (waiting / speed if speed > SLOWEST else inf)
        server = _Server(index, view.perf, view.start, free, speed, decode_load(view.decode), bound)
        for row in range(rows.standard):
            if not server.join(rows[row], int(rows.hit[row])):
                break
        return server


@dataclass(slots=True)
class _Lately:
    """Seconds of prefill offered per second, averaged over LATELY. Writer: `Unified.prefill`."""

    share: float = 0.0
    since: float = 0.0

    def at(self, now: float) -> float:
        """Return the average at time `now`."""
        return self.share * exp((self.since - now) / LATELY)

    def add(self, seconds: float, now: float) -> None:
        """Add a prompt that takes `seconds` alone."""
        self.share, self.since = self.at(now) + seconds / LATELY, now


def _hit(request: Request, one: InstanceView) -> int:
    """Return how many prompt tokens an instance need not compute. The last one is always computed."""
    return min(one.cached_tokens(request), request.prompt_length - 1)


def _prompt_time(request: Request, one: InstanceView, hit: int) -> float:
    """Return the seconds that an instance takes for a prompt alone, after its prefix hit."""
    left, before = np.array([float(request.prompt_length - hit)]), np.array([float(hit)])
    return float(one.perf.prefill_times(left, before, one.limits.tokens)[0])


@dataclass(slots=True)
class _Server:
    """What an instance can do for a new prompt. Writer: `_relieve`."""

    index: int
    perf: PerfModel
    start: float  # when its next step starts
    free: float  # when its waiting prompts are done
    speed: float  # share of full speed for prompts that need several steps
    load: Load | None = None  # next step with all waiting prompts; None if they do not fit
    bound: float = 0.0  # longest allowed time of this step, in seconds

    def ends(self, request: RequestView, hit: int, work: float) -> float:
        """Predict when a prompt ends that takes `work` seconds alone."""
        if self.load is not None:
            seconds = self.perf.step_time(with_prompt(self.load, request, hit))
            if seconds <= self.bound:
                return self.start + seconds
        return self.free + work / self.speed if self.speed > SLOWEST else inf

    def join(self, request: RequestView, hit: int) -> bool:
        """Add a waiting prompt to the next step. Returns whether it fits."""
        if self.load is not None:
            load = with_prompt(self.load, request, hit)
            self.load = load if self.perf.step_time(load) <= self.bound else None
        return self.load is not None
