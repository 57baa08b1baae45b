"""Qwen-Bailian: JSON lines with seconds, a type (text, search, image, file), turns, and blocks of 16 tokens.

Turns come at the times that were recorded, not after the one before them here. The last, partly filled block is named
as upstream recorded it, with the first output token in it, so it never matches another's; a name for the tokens after
the prompt may follow it and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..arrival import Arrival
from .rows import Source, json_rows

BLOCK = 16
MARK = "chat_id"  # the key that tells these lines from Mooncake's


def read(source: Source) -> Iterator[Arrival]:
    """Requests of class `type`, with `chat_id` as their key."""
    for row in json_rows(source):
        length, output = row.tokens("input_length"), row.tokens("output_length")
        names = row.names("hash_ids", -(-(length + output) // BLOCK), length)[: -(-length // BLOCK)]
        kind, chat = row.cells.get("type", ""), row.cells.get(MARK)
        if not isinstance(kind, str):
            row.fail("type", "a text such as text, search, image or file")
        if not isinstance(chat, int | str) or isinstance(chat, bool):
            row.fail(MARK, "a number or a text")
        if "turn" in row.cells:
            row.tokens("turn")
        time = row.number("timestamp")
        yield Arrival(time, length, output, source.slo, kind, str(chat), names, float(BLOCK))
