"""Mooncake: JSON lines with times in milliseconds and hashes of the prompt's blocks of 512 tokens.

Nearly all requests within about 3 s share one timestamp, so the variation of the gaps reflects that batching,
not the users. They stay together unless `spread` is given. The older `arxiv_mooncake_trace` and
`conversation_trace` overlap: combining them counts requests twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..arrival import Arrival
from .rows import Source, json_rows

BLOCK = 512  # tokens per entry of `hash_ids`


def read(source: Source) -> Iterator[Arrival]:
    """Read requests. Equal block hashes are shared prefixes."""
    for row in json_rows(source):
        with source.skipped:
            length, output = row.tokens("input_length"), row.tokens("output_length")
            names = row.names("hash_ids", -(-length // BLOCK), length)
            time = row.number("timestamp") / 1000
            yield Arrival(time, length, output, source.slo, hash_ids=names, block=float(BLOCK))
