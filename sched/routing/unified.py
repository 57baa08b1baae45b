"""Place prompts where they finish first, and move waiting prompts that would miss their TTFT."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from ..api.instance_view import InstanceMemo, InstanceView
from ..api.perf import Array, Load, PerfModel
from ..api.policy import Role
from ..api.request import BEST_EFFORT, Request, RequestView, State, tightest
from ..feasibility import (
    MARGIN,
    NO_ROWS,
    SHARE,
    deadlines,
    decode_load,
    joined,
    mixed_bound,
    on_time_set,
    piggyback_speed,
    promised,
    prompt_time,
    remaining_work,
    tightest_pace,
    with_prompt,
)
from ..policies.unified import GAP, STRETCH
from .base import Fleet, Move, Router
from .role_balancer import QUIET, RoleBalancer, slots_taken

NONE: Array = np.zeros(0)


class Unified(Router):
    """A router that places each prompt where it is predicted to finish first, and moves prompts by their value.

    If an instance cannot finish all its waiting prompts on time, the longest one that another instance gains
    without losing one moves there, until the others are on time. On both, deadlines count as if only 1 - `reserve`
    of the time to them were left, because more prompts will arrive. A prompt that cannot be on time where it waits
    moves to an instance that gains it with `MARGIN` of the time left, and so does one that fits into the next step of
    a decode instance, before others can arrive.

    A decode instance computes prompts in what steps of `share` of the tightest tpot or tbt leave beside
    its decodes, and takes none while prompts wait for its pages or nearly all its slots are taken.

    `change_roles`: see role_balancer.py. `decode_in_place`: see the method.
    """

    def __init__(
        self,
        reserve: float = 0.7,
        share: float = SHARE,
        stretch: float = STRETCH,
        change_roles: bool = True,
        decode_in_place: bool = True,
    ) -> None:
        self._reserve = reserve
        self._share = share
        self._stretch = stretch
        self._change_roles = change_roles
        self._decode_in_place = decode_in_place
        self._seen: dict[int, tuple[int, int]] = {}  # instance -> its state when last examined
        self._offered = _Lately()
        self._role_balancer = RoleBalancer(share)
        self._servers = InstanceMemo(self._server)

    def roles(self, fleet: Fleet) -> Mapping[int, Role]:
        return self._role_balancer.roles(fleet, self._offered.at(fleet.now)) if self._change_roles else {}

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        entries = fleet.entries
        hits = {index: _hit(request, fleet.instances[index]) for index in entries}
        work = {index: _prompt_time(request, fleet.instances[index], hit) for index, hit in hits.items()}

        def done(index: int) -> tuple[float, int, int]:
            instance = fleet.instances[index]
            server = self._servers.of(instance, fleet.now)
            return server.start + server.behind + work[index], instance.decode_context, index

        order = sorted(entries, key=done) if len(entries) > 1 else entries
        self._offered.add(work[order[0]], fleet.now, fleet.instances[order[0]].limits.rows)
        return order

    def decode_in_place(self, request: Request, index: int, fleet: Fleet) -> bool:
        """Return whether the request decodes where its prompt was computed, until there is room elsewhere.

        It does if prompts take little of the time, a step of all decodes there plus a prompt like
        this one fits its TTFT, and the same sum fits `share` of the tightest tpot or tbt. It does in any
        case once it has waited for pages as long as its TTFT, since shorter ones pass it.
        """
        if request.tier == BEST_EFFORT:
            return False
        if _overdue(request, fleet):
            return True
        if not self._quiet(fleet):
            return False
        instance = fleet.instances[index]
        rows = instance.view(fleet.now, max(fleet.now, instance.ends)).decode
        load = joined(decode_load(rows), np.array([float(request.prompt_length + request.generated)]))
        step, prompt = instance.perf.step_time(load), _prompt_time(request, instance, _hit(request, instance))
        pace = min(tightest_pace(rows), tightest(request, request.tpot))
        return step + prompt <= min(request.slo.ttft, self._share * pace)

    def decode_priority(self, request: Request, fleet: Fleet) -> float:
        """Return the rank of a request that waits for room to decode.

        While requests decode in place, the longest of them goes first, since waiting ones can
        decode in place instead, and steps of short contexts have room for more requests. Of those
        that wait for pages the shortest goes first: behind one that needs most of them many would be
        late. One that has waited too long is asked before, and then decodes in place.
        """
        if request.decodes_in_place:
            return -float(request.computed) if self._quiet(fleet) else inf
        if _overdue(request, fleet):
            return -inf
        return float(request.computed) if _has_slots(fleet) else 0.0

    def _quiet(self, fleet: Fleet) -> bool:
        """Return whether prefills took little of the time lately, so that decodes may stay on prefill instances."""
        return self._decode_in_place and self._offered.at(fleet.now) <= QUIET * len(fleet.entries)

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        moves: list[Move] = []
        if len(fleet.instances) == 1:
            return moves
        servers: dict[int, _Server] = {}
        for index in fleet.entries:
            instance = fleet.instances[index]
            seen = (len(instance), instance.steps)
            if self._seen.get(index) != seen:  # skip instances without an arrival, an end or a step
                self._seen[index] = seen
                moves += self._relieve(index, instance, fleet, servers)
        return moves

    def _relieve(self, index: int, instance: InstanceView, fleet: Fleet, servers: dict[int, _Server]) -> list[Move]:
        """Return moves of waiting prompts that free this instance of late first tokens.

        servers: where prompts may move, by instance, with those that moved there just now; filled if it is empty.
        """
        view = instance.view(fleet.now, max(fleet.now, instance.ends))
        rows = view.prefill
        if not len(rows):
            return []
        work, due = remaining_work(view, rows), deadlines(rows)
        able = view.start + work <= due
        soon = self._soon(view.start, work, due)
        lost = np.flatnonzero(~able & (due > fleet.now))
        late = on_time_set(view.start, soon, work).sum() < able.sum()  # not all that are able to be on time are
        if not len(lost) and not late:
            return []
        if not servers:
            servers.update(self._open(fleet))
        others = [other for other in servers if other != index]
        longest = np.flatnonzero(able) if late else NO_ROWS
        order = [lost[np.argsort(work[lost], kind="stable")], longest[np.argsort(-work[longest], kind="stable")]]
        first = np.concatenate(order)
        earliest = min((servers[other].start for other in others), default=inf)
        first = first[(rows.running[first] == 0) & (work[first] <= MARGIN * (due[first] - earliest))]
        if not len(first):
            return []
        share = np.where(able[first], 1.0 - self._reserve, MARGIN)
        ends = np.array([servers[other].ends(work[first], due[first], share) for other in others])
        moves: list[Move] = []
        for at in np.flatnonzero(np.isfinite(ends).any(axis=0)).tolist():
            row = int(first[at])
            if able[row] and not late:
                break
            if rows[row].generated:
                continue
            prompt = _Prompt(rows[row], int(rows.hit[row]), float(work[row]), float(due[row]), float(share[at]))
            place = _first(prompt, ends[:, at], [servers[other] for other in others])
            if place is not None:
                target = others[place]
                moves.append(Move(prompt.request.id, index, target, float(ends[place, at])))
                servers[target] = servers[target].with_prompt(prompt)
                ends[place] = servers[target].ends(work[first], due[first], share)
                if able[row]:
                    able[row], soon[row] = False, -np.inf
                    late = on_time_set(view.start, soon, work).sum() < able.sum()
        return moves

    def _open(self, fleet: Fleet) -> dict[int, _Server]:
        """Return the instances that take prompts from others."""
        return {
            index: self._servers.of(instance, fleet.now)
            for index, instance in enumerate(fleet.instances)
            if instance.accepting and not instance.kv_waiting and not slots_taken(instance)
        }

    def _server(self, instance: InstanceView, start: float) -> _Server:
        view = instance.view(start, start)
        rows = view.prefill
        work, due = remaining_work(view, rows, rows.standard), promised(rows, rows.deadline)
        if instance.role is Role.DECODE and len(view.decode):
            bound = mixed_bound(view, GAP, self._share, self._stretch)
            speed, load = piggyback_speed(view, bound), decode_load(view.decode)
            if not speed:
                return _Server(view.perf, start, inf, NONE, NONE, bound=bound)
            server = _Server(view.perf, start, float(work.sum()) / speed, NONE, NONE, speed, load, bound)
            for row in range(rows.standard):
                server.load = server.joined(rows[row], int(rows.hit[row]))
            return server
        soon = self._soon(start, work, due)
        kept = np.flatnonzero(on_time_set(start, soon, work))
        kept = kept[np.argsort(soon[kept], kind="stable")]
        return _Server(view.perf, start, float(work.sum()), soon[kept], work[kept])

    def _soon(self, start: float, work: Array, due: Array) -> Array:
        """Return deadlines that leave time for prompts to come, where a prompt alone can keep them."""
        soon = start + (1.0 - self._reserve) * (due - start)
        return np.where(start + work > soon, due, soon)


def _has_slots(fleet: Fleet) -> bool:
    """Return whether a decode instance has free slots, so that requests wait for its pages only."""
    decoders = (instance for instance in fleet.instances if instance.role is Role.DECODE and instance.accepting)
    return not all(map(slots_taken, decoders))


def _overdue(request: Request, fleet: Fleet) -> bool:
    """Return whether a computed prompt has waited for pages as long as its TTFT; without one, it has at once."""
    ttft, last = request.slo.ttft, request.last_token_at
    waited = fleet.now - (request.arrival if last is None else last)  # None: its first token is held
    return request.state is State.TRANSFERRING and (waited > ttft or not isfinite(ttft)) and _has_slots(fleet)


class _Prompt(NamedTuple):
    """A prompt that an instance may take."""

    request: RequestView
    hit: int  # tokens in the prefix cache
    work: float  # seconds alone
    due: float
    share: float  # of the time to it that it may take


class _Lately:
    """Seconds of prefill offered per second, by the latest prompts. Writer: the router.

    These are as many as an instance decodes at a time, and no older than one instance needs to compute so many.
    """

    def __init__(self) -> None:
        self._prompts: deque[tuple[float, float]] = deque()  # when each arrived, and the seconds of all up to it
        self._seconds = 0.0
        self._most = 2

    def at(self, now: float) -> float:
        """Return the average since the first of these prompts, which itself does not count; 0 without others."""
        prompts = self._prompts
        while len(prompts) > 2 and (len(prompts) > self._most or self._old(now)):
            prompts.popleft()
        if len(prompts) < 2 or now <= prompts[0][0]:
            return 0.0
        return (self._seconds - prompts[0][1]) / (now - prompts[0][0])

    def add(self, seconds: float, now: float, most: int) -> None:
        """Add a prompt that takes `seconds` alone. most: how many prompts count."""
        self._seconds += seconds
        self._most = max(2, most)
        self._prompts.append((now, self._seconds))
        self.at(now)  # drops those that no longer count

    def _old(self, now: float) -> bool:
        arrival, before = self._prompts[0]
        each = (self._seconds - before) / (len(self._prompts) - 1)
        return now - arrival > self._most * each


def _hit(request: Request, instance: InstanceView) -> int:
    """Return how many prompt tokens an instance need not compute. The last one is always computed."""
    return min(instance.cached_tokens(request), request.prompt_length - 1)


def _prompt_time(request: Request, instance: InstanceView, hit: int) -> float:
    """Return the seconds that an instance takes for a prompt alone, after its prefix hit."""
    return prompt_time(instance.perf, request.prompt_length - hit, hit, instance.limits.tokens)


@dataclass(slots=True)
class _Server:
    """What an instance can do for further prompts. Writer: the router's call that made it; then it does not change."""

    perf: PerfModel
    start: float  # when its next step starts
    behind: float  # seconds that all of its waiting prompts take
    due: Array  # without decodes: rising deadlines of those that are on time, with time left for prompts to come
    seconds: Array  # that each of these takes
    speed: float = 1.0  # share of full speed for prompts that need several steps, beside decodes
    load: Load | None = None  # next step with all waiting prompts; None if they do not fit, or none joins it
    bound: float = 0.0  # longest allowed time of this step, in seconds; 0 without decodes
    before: Array = field(init=False)  # seconds of those that are due first, by their number
    room: Array = field(init=False)  # seconds by which all others can be later, by this number

    def __post_init__(self) -> None:
        self.before = np.concatenate([[0.0], np.add.accumulate(self.seconds)])
        left = self.due - self.start - self.before[1:]
        self.room = np.concatenate([np.minimum.accumulate(left[::-1])[::-1], [inf]])

    def ends(self, work: Array, due: Array, share: Array) -> Array:
        """Return when prompts would end, each alone, within `share` of the time to their deadlines; inf: one is late.

        work: seconds that each takes alone. Beside decodes all other prompts count as before it: more decodes will
        join, so that the speed is an upper bound. A prompt that may fit into the next step may take `MARGIN` of the
        time; it does not end before the time that is returned, see `joins`.
        """
        start, limit = self.start, self.start + share * (due - self.start)
        if not self.bound:
            at = self.due.searchsorted(limit, side="right")
            ends = start + self.before[at] + work
            return np.where((ends <= limit) & (work <= self.room[at]), ends, inf)
        ends = start + work / self.speed + self.behind
        ends[ends > limit] = inf
        if self.load is not None:
            may = (work <= self.bound) & (start + work <= start + MARGIN * (due - start))
            ends[may] = start + work[may]
        return ends

    def joins(self, prompt: _Prompt) -> float:
        """Return when a prompt for which there is a step to join would end; inf if it or another is late."""
        assert self.load is not None
        ends = self.start + self.perf.step_time(with_prompt(self.load, prompt.request, prompt.hit))
        if ends <= self.start + self.bound:
            return ends if ends <= self.start + MARGIN * (prompt.due - self.start) else inf
        ends = self.start + prompt.work / self.speed + self.behind
        return ends if ends <= self.start + prompt.share * (prompt.due - self.start) else inf

    def with_prompt(self, prompt: _Prompt) -> _Server:
        """Return the same with a prompt that moves here."""
        mine = prompt.work / self.speed
        if self.bound:
            return replace(self, behind=self.behind + mine, load=self.joined(prompt.request, prompt.hit))
        limit = self.start + prompt.share * (prompt.due - self.start)
        at = self.due.searchsorted(limit, side="right")
        due, seconds = np.insert(self.due, at, limit), np.insert(self.seconds, at, mine)
        return replace(self, behind=self.behind + mine, due=due, seconds=seconds)

    def joined(self, request: RequestView, hit: int) -> Load | None:
        """Return the next step with one more prompt, or None if it does not fit."""
        load = None if self.load is None else with_prompt(self.load, request, hit)
        return None if load is None or self.perf.step_time(load) > self.bound else load


def _first(prompt: _Prompt, ends: Array, servers: Sequence[_Server]) -> int | None:
    """Return the server on which a prompt ends first; None if none takes it.

    ends: times from `_Server.ends`, by server; made exact where they matter.
    """
    while isfinite(ends[place := int(ends.argmin())]):
        if servers[place].load is None or (exact := servers[place].joins(prompt)) == ends[place]:
            return place
        ends[place] = exact
    return None
