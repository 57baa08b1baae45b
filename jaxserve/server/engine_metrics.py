"""Metrics of the engine's own snapshots, read at each scrape: one family per row of `sched/api/metric.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from jaxserve.engine.runtime.classes import Spread
from jaxserve.engine.runtime.info import Stats
from jaxserve.sched.api.metric import COUNTER, GAUGE, HISTOGRAM, SUMMARY, WITHIN, Metric, metrics_of
from jaxserve.settings.operations import PREFIX

READY = "ready", "1 if an engine takes requests; 0 while the server starts, and while its engines are away."
FAMILIES: dict[str, Any] = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
    SUMMARY: SummaryMetricFamily,
}
Key = tuple[str, ...]  # values of labels


class EngineCollector(Collector):
    """A collector of the engine's own gauges and counters, read at each scrape."""

    def __init__(self, engine: Any, model_name: str, prefix: str = PREFIX) -> None:
        self._engine = engine
        self._model = model_name
        self._prefix = prefix

    def collect(self) -> Iterator[Family]:
        yield from self._families(Stats, [((), self._engine.stats())])
        yield from self._facts()

    def _families(self, kind: Any, snapshots: Sequence[tuple[Key, Any]], labels: Key = ()) -> Iterator[Family]:
        """Yield the families of a class of snapshots, each with the values of its labels."""
        for metric in metrics_of(kind):
            values = [
                (key + more, snapshot, value)
                for key, snapshot in snapshots
                for more, value in _values(metric, getattr(snapshot, metric.attribute))
            ]
            named = (*labels, metric.label) if metric.label else labels
            if metric.kind == WITHIN:
                yield from self._families(metric.type, [(key, value) for key, _, value in values], named)
            else:
                yield self._family(metric, values, named)

    def _family(self, metric: Metric, values: Iterable[tuple[Key, Any, Any]], labels: Key) -> Family:
        """Return one family. values: of labels, the snapshot, and the value in it."""
        untyped: Any = FAMILIES[metric.kind](self._prefix + metric.name, metric.text, labels=["model_name", *labels])
        for key, snapshot, value in values:
            if metric.kind == HISTOGRAM:
                seen = value if isinstance(value, Spread) else Spread(tuple(value), getattr(snapshot, metric.of))
                self._add(untyped, metric.edges, [self._model, *key], labels, seen)
            elif metric.kind == SUMMARY:
                count = getattr(snapshot, metric.of)
                untyped.add_metric(
                    [self._model, *key], sum(count.values()) if isinstance(count, Mapping) else count, value
                )
            else:
                untyped.add_metric([self._model, *key], float(value))
        family: Family = untyped
        return family

    def _add(self, family: Any, edges: Sequence[float], values: list[str], labels: Key, seen: Spread) -> None:
        """Add a histogram, unless it has labels and no observation."""
        if not seen.count and labels:
            return
        up_to = zip((*map(str, map(float, edges)), "+Inf"), accumulate(seen.sizes), strict=True)
        family.add_metric(values, list(up_to), seen.total)
        if edges[0] < 0:  # prometheus_client omits the count of histograms with negative buckets
            named = dict(zip(("model_name", *labels), values, strict=True))
            family.add_sample(f"{family.name}_count", named, seen.count)

    def _facts(self) -> Iterator[Family]:
        """Yield what does not change while an engine runs."""
        info, promise = self._engine.info, self._engine.info.promise
        goals = {"ttft": promise.slo.ttft, "tpot": promise.slo.tpot}
        kept = "1 if this machine can meet the objective at a useful batch size, by step times measured at startup."
        for name, text, labels, values in (
            (*READY, (), {(): self._engine.ailment is None}),
            ("slo_seconds", "Objectives of requests that set none.", ("objective",),
             {(name,): goal for name, goal in goals.items()}),
            ("slo_attainable", kept, ("objective",), {(name,): name not in promise.broken for name in goals}),
            ("cache_config_info", "Page size and number of pages of the KV cache, as labels.",
             ("engine", "block_size", "num_gpu_blocks"),
             {(instance.name, str(instance.page_size), str(instance.pages)): 1 for instance in info.instances}),
            ("scheduler_info", "Policy and routing, as labels.", ("policy", "routing"),
             {(info.policy, info.routing): 1}),
            ("attention_backend_info", "The attention backend, as a label.", ("backend",), {(info.attention,): 1}),
        ):  # fmt: skip
            rows = [(key, None, value) for key, value in values.items()]
            yield self._family(Metric(GAUGE, name, text), rows, labels)


def _values(metric: Metric, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield the values of an attribute, with the value of the row's label if it has one."""
    if not metric.label:
        if value is not None:
            yield (), value
    elif isinstance(value, Mapping):
        yield from (((key,), count) for key, count in {**dict.fromkeys(metric.keys, 0), **value}.items())
    else:
        yield from (((getattr(row, "name", str(at)),), row) for at, row in enumerate(value))
