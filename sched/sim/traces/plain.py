"""CSV of one row a request: `id, arrival_s, input_tokens, output_tokens`, optionally `ttft_slo_s, tpot_slo_s, class`.

Other simulators have the same under names of their own: vidur and SplitwiseSim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..arrival import Arrival
from .rows import Source, csv_rows

COLUMNS = ("id", "arrival_s", "input_tokens", "output_tokens", "ttft_slo_s", "tpot_slo_s", "class")
NEEDED = COLUMNS[:4]
VIDUR = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
SPLITWISE = ("arrival_timestamp", "prompt_size", "token_size")


def read(source: Source) -> Iterator[Arrival]:
    """Read requests. Empty SLO cells take the default of the trace."""
    names = (NEEDED[1:], VIDUR, SPLITWISE)
    time, prompt, output = next(columns for columns in names if set(columns) <= set(source.header))
    key = "id" if time == NEEDED[1] else "request_id"
    for row in csv_rows(source):
        with source.skipped:
            promised = replace(
                source.slo,
                ttft=row.number("ttft_slo_s", source.slo.ttft, positive=True),
                tpot=row.number("tpot_slo_s", source.slo.tpot, positive=True),
            )
            yield Arrival(
                row.number(time),
                row.tokens(prompt),
                row.tokens(output),
                promised,
                row.cells.get("class", ""),
                row.cells.get(key, ""),
            )
