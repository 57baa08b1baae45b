"""What the fields of a snapshot are to those who read metrics: one row per metric, where its value is declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

KEY = "metric"
COUNTER, GAUGE, SUMMARY, HISTOGRAM, WITHIN = "counter", "gauge", "summary", "histogram", "within"


@dataclass(frozen=True)
class Metric:
    """A row: how a value is called and read."""

    kind: str
    name: str  # without prefix and without the suffix of its kind
    text: str  # what it counts, for people
    label: str = ""  # of a mapping: what its keys are; of a sequence: what its indices are
    keys: tuple[str, ...] = ()  # of a mapping, those that always have a value
    of: str = ""  # summary: the attribute that counts; histogram of plain sizes: the attribute with the sum
    edges: Sequence[float] = ()  # of a histogram: upper edges
    type: Any = None  # within: the class of the snapshots inside, whose rows get `label`
    attribute: str = ""  # that has the value; of a field, its name


def row(kind: str, name: str, text: str, more: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return a dataclass field that is a metric. more: the rest of the row; options: as of `field`."""
    return field(metadata={KEY: Metric(kind, name, text, **(more or {}))}, **options)


def counter(name: str, text: str) -> Any:
    """Return a field that only grows, from 0."""
    return row(COUNTER, name, text, default=0)


def gauge(name: str, text: str, default: float = 0) -> Any:
    """Return a field that goes up and down."""
    return row(GAUGE, name, text, default=default)


def summary(name: str, text: str, of: str) -> Any:
    """Return a field of summed values; the attribute `of` counts them, or is a mapping of counts."""
    return row(SUMMARY, name, text, {"of": of}, default=0.0)


def within(type_: Any, label: str = "", **options: Any) -> Any:
    """Return a field with snapshots of another class: a mapping by `label`, or a sequence, named by theirs."""
    return row(WITHIN, "", "", {"type": type_, "label": label}, **options)


def metrics_of(snapshot: Any) -> Iterator[Metric]:
    """Yield the rows of a class: those of its fields, then those in its `DERIVED`, of properties."""
    for each in fields(snapshot):
        if (metric := each.metadata.get(KEY)) is not None:
            yield Metric(**{**vars(metric), "attribute": each.name})
    yield from getattr(snapshot, "DERIVED", ())
