"""The set-ups that a search tries on a number of devices: meshes, splits, policies and sizes of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxserve.capacity.trial import Candidate
from jaxserve.sched.policies import HALVES, WHOLE

if TYPE_CHECKING:
    from jaxserve.capacity.fit import Fit

POLICIES = ("unified", "distserve", "sarathi")  # the default, and the usual ones of split and of mixed instances
CHUNKS = (8192, 2048)  # tokens of a step


def candidates(
    devices: int, fits: Mapping[int, Fit], policies: Sequence[str], chunks: Sequence[int]
) -> Iterator[Candidate]:
    """Yield every set-up that uses all `devices`, of the T that `fits` has. The order decides ties.

    A policy for mixed instances is tried colocated only, one with halves split only (alone on a single instance),
    `unified` in both ways.
    """
    for tp in sorted(fits):
        if devices % tp or not fits[tp].fits:
            continue
        instances = devices // tp
        splits = [None, *range(1, instances)]
        for prefill in splits:
            for policy in policies:
                if _suits(policy.partition(":")[0], instances, prefill):
                    for chunk in chunks:
                        yield Candidate(instances, tp, prefill, policy, chunk)


def _suits(policy: str, instances: int, prefill: int | None) -> bool:
    if policy in WHOLE and policy != "unified":
        return prefill is None
    if policy in HALVES or "=" in policy:
        return prefill is not None or instances == 1
    return True
