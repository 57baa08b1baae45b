"""One reading of a server's metrics, and what happened between two of them.

The names are vLLM's, after any prefix (`vllm:`, `jaxserve:`). What only jaxserve has, such as attainment, is empty
for other servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import inf, isfinite, nan
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.errors import InvalidValue

RUNNING = "num_requests_running"
Labels = tuple[tuple[str, str], ...]
# The first that a server has; the later ones are older names.
KV = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
TPOT = ("request_time_per_output_token_seconds", "time_per_output_token_seconds", "inter_token_latency_seconds")


class Histogram(NamedTuple):
    """Observations: how many, their sum, and how many are at or below each bound."""

    observed: float
    total: float
    buckets: Mapping[float, float]

    @property
    def mean(self) -> float:
        return self.total / self.observed if self.observed else nan

    @property
    def last(self) -> float:
        """The largest finite bound; 0 without one."""
        return max((bound for bound in self.buckets if isfinite(bound)), default=0.0)

    def quantile(self, share: float) -> float:
        """Estimate a quantile as Prometheus does, evenly within its bucket; above the last bound: inf."""
        if not self.observed or not self.buckets:
            return nan
        wanted, low, below = share * self.observed, 0.0, 0.0
        for bound, upto in sorted(self.buckets.items()):
            if upto >= wanted:
                if not isfinite(bound):
                    return inf
                return low + (bound - low) * (wanted - below) / (upto - below) if upto > below else bound
            low, below = bound, upto
        return inf


class Sample:
    """The series of one reading, without the prefix of their names. `at`: seconds on the reader's clock."""

    def __init__(self, text: str, at: float) -> None:
        """Parse Prometheus' text. Raises InvalidValue if it is none, or has no metric of vLLM's names."""
        self.at = at
        self._series: dict[str, dict[Labels, float]] = {}
        try:
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except ValueError as error:
            raise InvalidValue(f"the metrics are not in Prometheus' text format: {error!s:.200}", "url") from error
        name = next((sample.name for sample in samples if sample.name.endswith(RUNNING)), None)
        if name is None and any(sample.name.endswith(":ready") and not sample.value for sample in samples):
            raise InvalidValue("the model is not ready yet", "url")
        if name is None:
            raise InvalidValue(f"no metric ends in {RUNNING}: not a server with vLLM's metrics", "url")
        self.prefix = name.removesuffix(RUNNING)
        self.started = next((sample.value for sample in samples if sample.name == "process_start_time_seconds"), None)
        for sample in samples:
            if sample.name.startswith(self.prefix):
                labels = tuple(sorted(sample.labels.items()))
                self._series.setdefault(sample.name.removeprefix(self.prefix), {})[labels] = sample.value

    def series(self, name: str, **wanted: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of each series of a name that has these labels."""
        for labels, value in self._series.get(name, {}).items():
            named = dict(labels)
            if wanted.items() <= named.items():
                yield named, value

    def total(self, name: str, **wanted: str) -> float:
        """Return the sum over series; NaN if there is none."""
        values = [value for _, value in self.series(name, **wanted)]
        return sum(values) if values else nan

    def by(self, name: str, label: str) -> dict[str, list[float]]:
        """Return the values of a metric by the value of a label."""
        grouped: dict[str, list[float]] = {}
        for labels, value in self.series(name):
            if label in labels:
                grouped.setdefault(labels[label], []).append(value)
        return grouped

    def values(self, name: str, label: str) -> list[str]:
        """List the values of a label of a metric, in the server's order."""
        return list(dict.fromkeys(labels[label] for labels, _ in self.series(name) if label in labels))

    def has(self, name: str) -> bool:
        return name in self._series

    def first(self, names: tuple[str, ...], suffix: str = "") -> str:
        """Return the first of several names that the server has; the first one if it has none."""
        return next((name for name in names if self.has(name + suffix)), names[0])

    def histogram(self, name: str, **wanted: str) -> Histogram:
        """Return the sum of the histograms, or summaries, of a name."""
        buckets: dict[float, float] = {}
        for labels, value in self.series(f"{name}_bucket", **wanted):
            with suppress(KeyError, ValueError):  # a series that is no bucket
                buckets[float(labels["le"])] = buckets.get(float(labels["le"]), 0.0) + value
        count, total = self.total(f"{name}_count", **wanted), self.total(f"{name}_sum", **wanted)
        return Histogram(0.0 if count != count else count, 0.0 if total != total else total, buckets)


class Interval:
    """What happened from one reading to the next. Without an earlier one: since the server started."""

    def __init__(self, now: Sample, before: Sample | None = None) -> None:
        self.now = now
        self._before = before if before is not None and _goes_on(before, now) else None
        self.seconds = nan if self._before is None else now.at - self._before.at

    def gained(self, name: str, **wanted: str) -> float:
        """Return by how much a counter rose; NaN if the server has none."""
        later = self.now.total(name, **wanted)
        earlier = 0.0 if self._before is None else self._before.total(name, **wanted)
        return later - (earlier if earlier == earlier else 0.0)

    def rate(self, name: str, **wanted: str) -> float:
        """Return the rise of a counter per second."""
        return self.gained(name, **wanted) / self.seconds if self.seconds > 0 else nan

    def histogram(self, name: str, **wanted: str) -> Histogram:
        """Return the observations of the interval."""
        later = self.now.histogram(name, **wanted)
        if self._before is None:
            return later
        earlier = self._before.histogram(name, **wanted)
        buckets = {bound: count - earlier.buckets.get(bound, 0.0) for bound, count in later.buckets.items()}
        return Histogram(later.observed - earlier.observed, later.total - earlier.total, buckets)

    def share(self, part: str, whole: str, **wanted: str) -> float:
        """Return the share of one counter's rise in another's; NaN if that did not rise."""
        of = self.gained(whole, **wanted)
        return self.gained(part, **wanted) / of if of > 0 else nan


def _goes_on(before: Sample, now: Sample) -> bool:
    """Return whether two readings are of one run of a server: it has not started again, and no counter fell."""
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    same = (before.prefix, before.started) == (now.prefix, now.started)
    return same and not any(now.total(name) < before.total(name) for name in names)
