"""Requests wait where they can be on time: who loses a place in one instance's on-time set may have one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..feasibility import deadlines, decode_load, guest_speed, mixed_bound, on_time_set, remaining_work, tightest_tpot
from ..policies.unified import ALONE, GAP, SOON
from ..policy import Role
from ..request import State
from ..scheduler import Scheduler
from . import Fleet, Move
from .least_work import LeastWork

SURE = 0.6  # of the time left: what ends soon is as certain as that
FULL = 0.95  # of the rows of the instances that decode: they are all taken, or nearly
CALM = 0.6  # of them: there is room for all that decode


class Unified(LeastWork):
    """Prompts come to the prefill instance with the least work. Where not all that wait there can be on time, the
    longest prompt that another instance is predicted to finish in `margin` of its time left goes there instead, until
    all can. On a decode instance it has what steps of `share` of the tightest tpot leave; none where prompts already
    wait for pages.

    What is far off is uncertain (others will come there), so that a prompt moves only where `margin` of its time left
    is enough; what takes less than `SOON` may take `SURE` of it. early: prompts are moved while there is still this
    share of their time left, not when the last of it is about to go. turn: see `roles`.
    """

    def __init__(
        self, margin: float = 0.2, share: float = 0.8, stretch: float = 1.5, early: float = 0.5, turn: bool = True
    ) -> None:
        self._margin = margin
        self._early = early
        self._share = share
        self._stretch = stretch
        self._turn = turn
        self._seen: dict[int, tuple[int, int]] = {}  # instance -> how far it was when last looked at
        self._apart: dict[int, Role] = {}  # roles before all instances were made mixed; empty where they are not

    def roles(self, fleet: Fleet) -> Mapping[int, Role]:
        """All instances do both from when those that decode have no row left for a prompt that is done, until there
        are few enough rows again.

        Where d of n instances decode, steps n/d times as long on all of them decode as many tokens per second, and
        leave prompts the time of n - d instances: where that is within the tpot nothing is lost, and prompts find rows.
        """
        decoders = [fleet.instances[index] for index in fleet.decoders]
        if self._apart and not decoders and len(fleet.entries) == len(self._apart):
            rows = sum(one.running for one in fleet.instances)
            room = sum(fleet.instances[at].limits.rows for at, role in self._apart.items() if role is Role.DECODE)
            if rows > CALM * room:
                return {}
            before, self._apart = self._apart, {}
            return before
        self._apart = {}
        if not self._turn or not decoders:
            return {}
        most = ALONE * len(decoders) / len(fleet.instances)
        if not all(_full(one, fleet.now, most) for one in decoders):
            return {}
        self._apart = {index: one.role for index, one in enumerate(fleet.instances)}
        return dict.fromkeys(self._apart, Role.MIXED)

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        moves: list[Move] = []
        for index in fleet.entries:
            one = fleet.instances[index]
            seen = (len(one), one.counters.steps)
            if self._seen.get(index) != seen:  # nothing came, ended or moved on otherwise
                self._seen[index] = seen
                moves += self._relieve(index, one, fleet)
        return moves

    def _relieve(self, index: int, one: Scheduler, fleet: Fleet) -> list[Move]:
        view = one.view(fleet.now, max(fleet.now, one.ends))
        rows = view.prefill
        if not len(rows):
            return []
        work, due = remaining_work(view, rows), deadlines(rows)
        soon = np.where(due > view.start, view.start + self._early * (due - view.start), due)
        able = view.start + work <= soon
        if on_time_set(view.start, soon, work).sum() == able.sum():
            return []
        moves: list[Move] = []
        free = {
            other: self._server(fleet.instances[other], fleet)
            for other in range(len(fleet.instances))
            if other != index and not fleet.instances[other].kv_waiting
        }
        for row in np.argsort(-work, kind="stable").tolist():
            request = rows[row]
            if not able[row] or request.state is not State.WAITING or request.generated:
                continue
            for other, (at, speed) in sorted(free.items(), key=lambda item: item[1]):
                ends = at + work[row] / speed if speed > 0.05 else np.inf
                left = due[row] - fleet.now
                if ends - fleet.now <= max(self._margin * left, min(SOON, SURE * left)):
                    moves.append(Move(request.id, index, other, float(ends)))
                    free[other] = (float(ends), speed)
                    able[row], soon[row] = False, -np.inf
                    break
            else:
                continue
            if on_time_set(view.start, soon, work).sum() == able.sum():
                break
        return moves

    def _server(self, one: Scheduler, fleet: Fleet) -> tuple[float, float]:
        """When a prompt that comes now could begin, and how fast it would go."""
        view = one.view(fleet.now, max(fleet.now, one.ends))
        speed = 1.0
        if one.role is Role.DECODE:
            speed = guest_speed(view, mixed_bound(view, self._share, self._stretch, gap=GAP))
        work = remaining_work(view, view.prefill)
        waiting = float(work[view.prefill.best_effort == 0].sum())
        return view.start + (waiting / speed if speed > 0.05 else np.inf), speed


def _full(one: Scheduler, now: float, share: float) -> bool:
    """Whether prompts wait for rows, and all rows together take no more than a share of the tightest tpot."""
    if not one.kv_waiting or one.running < FULL * one.limits.rows:
        return False
    rows = one.view(now, max(now, one.ends)).decode
    return one.perf.step_time(decode_load(rows)) <= share * tightest_tpot(rows)
