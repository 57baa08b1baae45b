"""Role changes when decode slots run short, for the `unified` router."""

from __future__ import annotations

from collections.abc import Mapping

from ..api.instance_view import InstanceView
from ..api.policy import Role
from ..feasibility import decode_load, tightest_pace
from .base import Fleet

FULL = 0.95  # share of the decode slots in use: (nearly) all are taken
CALM = 0.6  # share of the decode slots in use: there is room for all decodes
QUIET = 0.25  # share of the prefill instances' time in use: they have little to do


class RoleBalancer:
    """Role changes for when computed prompts find no slot on any decode instance. Writer of its own changes.

    Either one prefill instance decodes for a while, or all instances become mixed, until fewer
    slots are needed.

    An instance is lent if the remaining prefill instances would still have little to do. It also
    returns when they have much to do. Otherwise all become mixed: if d of n instances decode, steps
    n/d times as long on all n instances decode as many tokens per second, and leave prompts the
    time of n - d instances. If such steps are within `share` of the tpot, nothing is lost, and
    prompts find slots.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._apart: dict[int, Role] = {}  # roles before all became mixed; empty if they are not
        self._lent: set[int] = set()  # prefill instances that decode for now

    def roles(self, fleet: Fleet, offered: float) -> Mapping[int, Role]:
        """Return the role changes to make now. `offered`: seconds of prefill that arrive per second."""
        decoders = [fleet.instances[index] for index in fleet.decoders]
        if self._apart and not decoders and len(fleet.entries) == len(self._apart):
            rows = sum(instance.running for instance in fleet.instances)
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
        self._apart = {index: instance.role for index, instance in enumerate(instances)}
        return dict.fromkeys(self._apart, Role.MIXED)

    def _given_back(self, fleet: Fleet, offered: float) -> Mapping[int, Role]:
        instances, decoders = fleet.instances, fleet.decoders
        if not self._lent or len(decoders) < 2:  # roles may also be changed by an administrator
            return {}
        back = min(self._lent, key=lambda index: instances[index].running)
        room = sum(instances[index].limits.rows for index in decoders if index != back)
        calm = sum(instances[index].running for index in decoders) <= CALM * room
        if not calm and offered <= 2 * QUIET * len(fleet.entries):
            return {}
        self._lent.remove(back)
        return {back: Role.PREFILL}


def slots_taken(instance: InstanceView) -> bool:
    """Return whether (nearly) all slots of an instance are taken."""
    return instance.running >= FULL * instance.limits.rows


def _lacks_rows(instance: InstanceView) -> bool:
    return instance.kv_waiting > 0 and slots_taken(instance)


def _quick(instance: InstanceView, now: float, share: float) -> bool:
    """Return whether a step of all running decodes takes at most `share` of the tightest tpot or tbt."""
    rows = instance.view(now, max(now, instance.ends)).decode
    return instance.perf.step_time(decode_load(rows)) <= share * tightest_pace(rows)
