"""The metric values that `LLM.get_metrics` returns, in the classes of `vllm.v1.metrics.reader`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry


@dataclass(frozen=True, slots=True)
class Metric:
    """One series: a name and its label values."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A total that never decreases."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value that may rise and fall."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """The count and sum of observations, and the number at or below each bound ("+Inf": all)."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(registry: CollectorRegistry, prefix: str) -> list[Metric]:
    """Return every series with a name that begins with `prefix`. Counter names lack `_total`, as in vLLM."""
    metrics: list[Metric] = []
    for family in registry.collect():
        if not family.name.startswith(prefix):
            continue
        if family.type == "counter":
            totals = (sample for sample in family.samples if sample.name.endswith("_total"))
            metrics += [Counter(family.name, dict(total.labels), int(total.value)) for total in totals]
        elif family.type == "gauge":
            metrics += [Gauge(family.name, dict(sample.labels), sample.value) for sample in family.samples]
        elif family.type in ("histogram", "summary"):
            metrics += _histograms(family.name, family.samples)
    return metrics


def _histograms(name: str, samples: Iterable[Any]) -> list[Histogram]:
    """Return one histogram for each set of labels other than `le`. A summary has no buckets."""
    series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        fields = series.setdefault(tuple(sorted(labels.items())), {"labels": labels, "buckets": {}})
        kind = sample.name.removeprefix(name).lstrip("_")
        if kind == "bucket":
            fields["buckets"][sample.labels["le"]] = int(sample.value)
        elif kind in ("count", "sum"):
            fields[kind] = sample.value
    return [
        Histogram(name, metric["labels"], int(metric.get("count", 0)), float(metric.get("sum", 0.0)), metric["buckets"])
        for metric in series.values()
    ]
