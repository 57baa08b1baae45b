"""`--slo-file`: classes of requests and their objectives, in the vocabulary of the server's tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.bench.load import Objective, SloClass
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.settings.tiers import StageGoals, Tier
from jaxserve.yamlio import load_yaml


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of requests: fields of a tier, and its share of the requests. Seconds."""

    share: float = 1.0
    ttft: float | None = None
    tpot: float | None = None
    tbt: float | None = None
    stages: StageGoals = field(default_factory=StageGoals)
    tier: str | None = None
    best_effort: bool = False

    def __post_init__(self) -> None:
        if not self.share > 0:
            raise InvalidValue(f"share={self.share!r} must be positive", "share")
        if self.tier == "":
            raise InvalidValue("tier='' must name a tier of the server", "tier")
        if self.best_effort and self.tier:
            raise InvalidValue(f"best_effort: true is a tier of its own: leave tier={self.tier!r} out", "tier")
        Tier(self.ttft, self.tpot, self.tbt, self.stages, best_effort=self.best_effort)  # checks the times


@dataclass(frozen=True, slots=True)
class _File:
    classes: Mapping[str, _Class] = field(default_factory=dict)
    tiers: Mapping[str, Tier] = field(default_factory=dict)


def load_slo_file(path: Path) -> tuple[SloClass, ...]:
    """Load the classes of a YAML file. Raises InvalidValue with file and line.

    `classes` maps names to {share, ttft, tpot, tbt, stages, tier, best_effort}. A file of the server's tiers
    (`--slo-tiers`) may be given instead: equal shares of the requests then ask for each of its `tiers`.
    """
    if not path.is_file():
        raise InvalidValue(f"slo_file={str(path)!r} is not a file", "slo_file")
    read = load_yaml(path, _File)
    if bool(read.classes) is bool(read.tiers):
        raise InvalidValue(f"{path} must have `classes`, or `tiers` as in configs/slo/tiers.yaml", "slo_file")
    tiers = {
        name: _Class(
            1.0, tier.ttft, tier.tpot, tier.tbt, tier.stages, None if tier.best_effort else name, tier.best_effort
        )
        for name, tier in read.tiers.items()
    }
    return tuple(_class_of(name, given) for name, given in (read.classes or tiers).items())


def _class_of(name: str, read: _Class) -> SloClass:
    ttft, tpot, tbt = (None if value is None else value * 1e3 for value in (read.ttft, read.tpot, read.tbt))
    tier = BEST_EFFORT if read.best_effort else read.tier
    stages = tuple((stage, value * 1e3) for stage, value in read.stages.pairs)
    return SloClass(read.share, Objective(ttft, tpot, name, tbt, tier, stages))
