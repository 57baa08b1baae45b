"""What instances are for, changed where rows to decode on are what is lacking: `unified`'s."""

from __future__ import annotations

from collections.abc import Mapping

from ..api.instance_view import InstanceView
from ..api.policy import Role
from ..feasibility import decode_load, tightest_tpot
from .base import Fleet

FULL = 0.95  # of the rows of the instances that decode: they are all taken, or nearly
CALM = 0.6  # of them: there is room for all that decode
QUIET = 0.25  # of the time of the instances that prompts come to: they have little to do
BUSY = 0.5  # of it: they have much


class RoleBalancer:
    """Where prompts that are done find no row on any instance that decodes, either one that prefills decodes from then
    on, or all instances do both, until there are few enough rows again.

    One is lent where prompts take so little of the time that the others that prefill would still have little to do; it
    is given back, too, when they have much to do. Otherwise, where d of n instances decode, steps n/d times as long on
    all of them decode as many tokens per second, and leave prompts the time of n - d instances: where that is within
    `share` of the tpot nothing is lost, and prompts find rows.

    Writer of what it changed.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._apart: dict[int, Role] = {}  # roles before all instances were made mixed; empty where they are not
        self._lent: set[int] = set()  # instances that would prefill, and decode for the time being

    def roles(self, fleet: Fleet, offered: float) -> Mapping[int, Role]:
        """Roles that change now. offered: seconds of prompts that come per second."""
        decoders = [fleet.instances[index] for index in fleet.decoders]
        if self._apart and not decoders and len(fleet.entries) == len(self._apart):
            rows = sum(one.running for one in fleet.instances)
            room = sum(fleet.instances[at].limits.rows for at, role in self._apart.items() if role is Role.DECODE)
            if rows > CALM * room:
                return {}
            before, self._apart = self._apart, {}
            return before
        self._apart = {}
        self._lent &= set(fleet.decoders)
        if decoders and all(map(_lacks_rows, decoders)):
            return self._more_rows(fleet, offered)
        return self._given_back(fleet, offered)

    def _more_rows(self, fleet: Fleet, offered: float) -> Mapping[int, Role]:
        instances = fleet.instances
        others = [index for index in fleet.entries if instances[index].role is Role.PREFILL]
        if len(others) > 1 and offered <= QUIET * (len(others) - 1):
            lent = min(others, key=lambda index: (instances[index].prefill_backlog, -instances[index].running))
            self._lent.add(lent)
            return {lent: Role.DECODE}
        most = self._share * len(fleet.decoders) / len(instances)
        if self._lent or not all(_quick(instances[index], fleet.now, most) for index in fleet.decoders):
            return {}
        self._apart = {index: one.role for index, one in enumerate(instances)}
        return dict.fromkeys(self._apart, Role.MIXED)

    def _given_back(self, fleet: Fleet, offered: float) -> Mapping[int, Role]:
        instances, decoders = fleet.instances, fleet.decoders
        if not self._lent or len(decoders) < 2:  # somebody else may have turned all the others
            return {}
        back = min(self._lent, key=lambda index: instances[index].running)
        room = sum(instances[index].limits.rows for index in decoders if index != back)
        calm = sum(instances[index].running for index in decoders) <= CALM * room
        if not calm and offered <= BUSY * len(fleet.entries):
            return {}
        self._lent.remove(back)
        return {back: Role.PREFILL}


def _lacks_rows(one: InstanceView) -> bool:
    return one.kv_waiting > 0 and one.running >= FULL * one.limits.rows


def _quick(one: InstanceView, now: float, share: float) -> bool:
    """Whether all rows together take no more than a share of the tightest tpot."""
    rows = one.view(now, max(now, one.ends)).decode
    return one.perf.step_time(decode_load(rows)) <= share * tightest_tpot(rows)
