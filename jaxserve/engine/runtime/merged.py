"""Facts and totals of several engines of one model, as of one engine. Their instances are called R/NAME."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

from jaxserve.engine.runtime.info import EngineInfo, Stats
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.cluster.ttft_predictions import Accuracy

EQUAL = ("model", "max_model_len", "vocab_size", "dtype", "policy", "routing", "eos", "attention")


def merged_info(several: Mapping[int, EngineInfo], alone: bool = False) -> EngineInfo:
    """Return the facts of all engines, by number.

    alone: the instances keep their names. Raises InvalidValue, naming the fact, if the engines differ in one of EQUAL.
    """
    base, first = next(iter(several.items()))
    for index, info in several.items():
        for name in EQUAL:
            mine, theirs = getattr(first, name), getattr(info, name)
            if mine != theirs:
                raise InvalidValue(f"{name} differs between replicas: {mine!r} on {base}, {theirs!r} on {index}", name)
    if alone:
        return first
    instances = [replace(x, name=f"{at}/{x.name}") for at, info in several.items() for x in info.instances]
    startup = max(part.startup_seconds for part in several.values())
    return replace(first, instances=tuple(instances), startup_seconds=startup)


def totals(stats: Stats) -> Stats:
    """Return a snapshot without levels, for an engine that has ended."""
    tiers = {name: replace(tier, pages=0, bytes=0) for name, tier in stats.kv_tiers.items()}
    return replace(stats, instances=(), transferring=0, kv_tiers=tiers)


def merged_stats(running: Mapping[int, Stats], ended: Sequence[Stats] = (), alone: bool = False) -> Stats:
    """Return the sums over engines. running: by number. alone: the instances keep their names."""
    several = [*running.values(), *ended]
    if alone and len(several) == 1:
        return several[0]
    stats: Stats = _sum([replace(part, instances=()) for part in several])
    instances = [
        replace(x, name=x.name if alone else f"{at}/{x.name}") for at, stats in running.items() for x in stats.instances
    ]
    return replace(stats, instances=tuple(instances))


def _sum(several: Sequence[Any]) -> Any:
    """Add values of one type: numbers, mappings by key, sequences by place, snapshots by field."""
    first = several[0]
    if isinstance(first, int | float):
        return sum(several)
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for part in several for key in part)
        return {key: _sum([part[key] for part in several if key in part]) for key in keys}
    if isinstance(first, Accuracy):  # its median cannot be added: that of the most predictions
        most = max(several, key=lambda histogram: histogram.count)
        several = [replace(part, median=0.0) for part in several]
        return replace(_fields(several), median=most.median)
    if is_dataclass(first):
        return _fields(several)
    return type(first)(map(sum, zip_longest(*several, fillvalue=0)))


def _fields(several: Sequence[Any]) -> Any:
    names = [each.name for each in fields(several[0])]
    return type(several[0])(**{name: _sum([getattr(part, name) for part in several]) for name in names})
