"""Objectives in settings, the tiers that requests can select, and the request classes of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.new_request import STANDARD
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import ANSWER, HEAVIEST, NO_SLO, SLO, THINKING
from jaxserve.yamlio import Positive, Range, check_fields, load_yaml, seconds

AUTO: Literal["auto"] = "auto"


def objective(given: str | float) -> float | Literal["auto"]:
    """Parse an objective: seconds or `auto`. Raises InvalidValue."""
    try:
        return AUTO if given == AUTO else seconds(given)
    except InvalidValue as error:
        raise InvalidValue(f"{error}, or auto") from None


Objective = Annotated[float | Literal["auto"], objective]

Stages = tuple[tuple[str, float], ...]  # (stage, tpot in seconds)

PLAIN = ("auto", "default", "scale", STANDARD)  # the server's own SLO, by OpenAI's names and ours
FREE = (BEST_EFFORT, "flex")  # no SLO
DEFAULT, CUSTOM = "default", "custom"  # classes of requests without a tier: the server's SLO, or the request's own


@dataclass(frozen=True, slots=True)
class StageGoal:
    """The objective of a stage, in seconds per token."""

    tpot: Positive

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class StageGoals:
    """The objectives of the stages of an output. None: the tier's tpot."""

    thinking: StageGoal | None = None
    answer: StageGoal | None = None

    @property
    def pairs(self) -> Stages:
        goals = ((THINKING, self.thinking), (ANSWER, self.answer))
        return tuple((stage, goal.tpot) for stage, goal in goals if goal is not None)


@dataclass(frozen=True, slots=True)
class Tier:
    """A service class that requests select with `service_tier`. None: the server's own SLO. Seconds."""

    ttft: Positive | None = None
    tpot: Positive | None = None
    tbt: Positive | None = None
    stages: StageGoals = StageGoals()
    priority: int = 0
    best_effort: bool = False  # no deadlines; may lose its KV, but no tokens
    weight: Annotated[float, Range(1 / HEAVIEST, HEAVIEST)] = 1.0  # see SLO

    def __post_init__(self) -> None:
        check_fields(self)
        if self.best_effort and ((self.ttft, self.tpot, self.tbt) != (None, None, None) or self.stages.pairs):
            raise InvalidValue("a tier with best_effort: true has no objectives: leave the times out", "best_effort")

    def slo(self, default: SLO) -> SLO:
        """Return the tier's SLO on a server with the SLO `default`."""
        if self.best_effort:
            return NO_SLO
        return SLO(
            default.ttft if self.ttft is None else self.ttft,
            default.tpot if self.tpot is None else self.tpot,
            default.tbt if self.tbt is None else self.tbt,
            stages_over(default.stages, self.tpot, self.stages.pairs),
            self.weight,
        )


class ResolvedTier(NamedTuple):
    """A tier on one server."""

    tier: Tier
    slo: SLO  # what it promises there
    name: str  # what the scheduler and the metrics call it: one name for all of OpenAI's aliases


@dataclass(frozen=True, slots=True)
class _File:
    tiers: Mapping[str, Tier]


def load_tiers(path: Path) -> Mapping[str, Tier]:
    """Load the tiers of a file, and add the built-in ones. Raises InvalidValue with file and line."""
    if not path.is_file():
        raise InvalidValue(f"slo_tiers={str(path)!r} does not exist: configs/slo/tiers.yaml is an example", "slo_tiers")
    free = dict.fromkeys(FREE, Tier(best_effort=True))
    return {**dict.fromkeys(PLAIN, Tier()), **load_yaml(path, _File).tiers, **free}


def resolve(name: str, tier: Tier, default: SLO) -> ResolvedTier:
    """Resolve a tier on a server whose own SLO is `default`."""
    one_name = BEST_EFFORT if tier.best_effort else STANDARD if name in PLAIN else name
    return ResolvedTier(tier, tier.slo(default), one_name)


def stages_over(below: Stages, tpot: float | None, own: Iterable[tuple[str, float]]) -> Stages:
    """Merge the stages of one level (a request, a tier) over those of the level below.

    tpot: the level's own TPOT for all stages, if any; it replaces every stage from below.
    """
    return tuple({**(dict(below) if tpot is None else {}), **dict(own)}.items())


class Classes:
    """The request classes of metrics: each configured tier, best effort, `default` and `custom`.

    Their number does not depend on what requests contain.
    """

    def __init__(self, tiers: Mapping[str, Tier], default: SLO) -> None:
        self._named = frozenset(name for name, tier in tiers.items() if name not in PLAIN and not tier.best_effort)
        plain = (tier.slo(default) for name, tier in tiers.items() if name in PLAIN)
        self._default = frozenset((*plain, NO_SLO))  # offline, requests have no objective by default
        self.names = (*sorted(self._named | {DEFAULT, CUSTOM}), BEST_EFFORT)

    def of(self, tier: str, slo: SLO) -> str:
        """Return the class of a request, from its canonical tier and its SLO."""
        if tier in self._named or tier == BEST_EFFORT:
            return tier
        return DEFAULT if tier == STANDARD and slo in self._default else CUSTOM
