"""Plain CSV: `id, arrival_s, input_tokens, output_tokens`, optionally `ttft_slo_s, tpot_slo_s, class`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..arrival import Arrival
from .rows import Source, csv_rows

COLUMNS = ("id", "arrival_s", "input_tokens", "output_tokens", "ttft_slo_s", "tpot_slo_s", "class")
NEEDED = COLUMNS[:4]


def read(source: Source) -> Iterator[Arrival]:
    """Read requests. Empty SLO cells take the default of the trace."""
    for row in csv_rows(source):
        promised = replace(
            source.slo,
            ttft=row.number("ttft_slo_s", source.slo.ttft, positive=True),
            tpot=row.number("tpot_slo_s", source.slo.tpot, positive=True),
        )
        yield Arrival(
            row.number("arrival_s"),
            row.tokens("input_tokens"),
            row.tokens("output_tokens"),
            promised,
            row.cells.get("class", ""),
            row.cells["id"],
        )
