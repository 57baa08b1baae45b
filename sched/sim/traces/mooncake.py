"""Mooncake: JSON lines with milliseconds and the names of the prompt's blocks of 512 tokens.

Nearly all requests of some 3 s share one timestamp: the variation of the gaps measures that batching, not the users.
They are left together unless `spread` is given. The older `arxiv_mooncake_trace` and `conversation_trace` overlap:
adding them up counts requests twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..arrival import Arrival
from .rows import Source, json_rows

BLOCK = 512  # tokens that one of `hash_ids` names


def read(source: Source) -> Iterator[Arrival]:
    """Requests whose prompts share what their block names say."""
    for row in json_rows(source):
        length, output = row.tokens("input_length"), row.tokens("output_length")
        names = row.names("hash_ids", -(-length // BLOCK), length)
        time = row.number("timestamp") / 1000
        yield Arrival(time, length, output, source.slo, hash_ids=names, block=float(BLOCK))
