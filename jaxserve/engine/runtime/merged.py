"""Facts and totals of several engines of one model, as of one engine. Their instances are called R/NAME."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from jaxserve.engine.runtime.classes import ClassStats, Spread
from jaxserve.engine.runtime.info import EngineInfo, Stats, TierTotals
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.cluster.ttft_predictions import Accuracy
from jaxserve.sched.instance.stats import Counters

EQUAL = ("model", "max_model_len", "vocab_size", "dtype", "policy", "routing", "eos", "attention")


def merged_info(several: Mapping[int, EngineInfo], alone: bool = False) -> EngineInfo:
    """Return the facts of all engines, by number.

    alone: the instances keep their names. Raises InvalidValue, naming the fact, if the engines differ in one of EQUAL.
    """
    base, first = next(iter(several.items()))
    for index, one in several.items():
        for name in EQUAL:
            mine, theirs = getattr(first, name), getattr(one, name)
            if mine != theirs:
                raise InvalidValue(f"{name} differs between replicas: {mine!r} on {base}, {theirs!r} on {index}", name)
    if alone:
        return first
    instances = [replace(x, name=f"{at}/{x.name}") for at, one in several.items() for x in one.instances]
    startup = max(one.startup_seconds for one in several.values())
    return replace(first, instances=tuple(instances), startup_seconds=startup)


def totals(stats: Stats) -> Stats:
    """Return a snapshot without levels, for an engine that has ended."""
    tiers = {name: replace(one, pages=0, bytes=0) for name, one in stats.kv_tiers.items()}
    return replace(stats, instances=(), transferring=0, kv_tiers=tiers)


def merged_stats(running: Mapping[int, Stats], ended: Sequence[Stats] = (), alone: bool = False) -> Stats:
    """Return the sums over engines. running: by number. alone: the instances keep their names."""
    several = [*running.values(), *ended]
    if alone and len(several) == 1:
        return several[0]
    made: dict[str, Any] = {}
    for each in fields(Stats):
        values = [getattr(one, each.name) for one in several]
        made[each.name] = sum(values) if isinstance(values[0], int | float) else None
    made["instances"] = tuple(
        replace(x, name=x.name if alone else f"{at}/{x.name}") for at, one in running.items() for x in one.instances
    )
    made["counters"] = Counters.total(one.counters for one in several)
    made["stall_sizes"] = tuple(map(sum, zip_longest(*(one.stall_sizes for one in several), fillvalue=0)))
    made["finished"] = _summed(one.finished for one in several)
    made["collections"] = _summed(one.collections for one in several)
    names = dict.fromkeys(name for one in several for name in one.classes)
    made["classes"] = {name: _class([one.classes[name] for one in several if name in one.classes]) for name in names}
    names = dict.fromkeys(name for one in several for name in one.kv_tiers)
    made["kv_tiers"] = {name: _tier([one.kv_tiers[name] for one in several if name in one.kv_tiers]) for name in names}
    paths = dict.fromkeys(path for one in several for path in one.ttft_predictions)
    made["ttft_predictions"] = {
        path: _accuracy([one.ttft_predictions[path] for one in several if path in one.ttft_predictions])
        for path in paths
    }
    return Stats(**made)


def _summed(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in several:
        total.update(one)
    return dict(total)


def _tier(several: Sequence[TierTotals]) -> TierTotals:
    return TierTotals(*(sum(getattr(one, each.name) for one in several) for each in fields(TierTotals)))


def _spread(several: Sequence[Spread]) -> Spread:
    return Spread(tuple(map(sum, zip(*(one.sizes for one in several), strict=True))), sum(one.total for one in several))


def _class(several: Sequence[ClassStats]) -> ClassStats:
    return ClassStats(
        _summed(one.ended for one in several),
        _summed(one.attained for one in several),
        {phase: _spread([one.slack[phase] for one in several]) for phase in several[0].slack},
        _spread([one.errors for one in several]),
    )


def _accuracy(several: Sequence[Accuracy]) -> Accuracy:
    """Return the sums; the median is that of the engine with the most predictions."""
    most = max(several, key=lambda one: one.count)
    return Accuracy(
        sum(one.count for one in several),
        sum(one.predicted for one in several),
        sum(one.measured for one in several),
        sum(one.errors for one in several),
        most.median,
    )
