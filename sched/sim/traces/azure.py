"""Azure LLM inference traces of 2023 (no zone, seven fractional digits) and 2024 (zone, six digits or none)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from ..arrival import Arrival
from .rows import Source, csv_rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(source: Source) -> Iterator[Arrival]:
    """Read times relative to the whole second of the first row."""
    epoch = None
    for row in csv_rows(source):
        with source.skipped:
            if epoch is None:  # near the data: seconds since 1970 would cost two of the seven fractional digits
                zero = datetime(1970, 1, 1, tzinfo=UTC)
                epoch = zero + timedelta(seconds=int(row.timestamp(COLUMNS[0], zero)))
            yield Arrival(row.timestamp(COLUMNS[0], epoch), row.tokens(COLUMNS[1]), row.tokens(COLUMNS[2]), source.slo)
