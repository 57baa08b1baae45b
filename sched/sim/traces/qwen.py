"""Qwen-Bailian: JSON lines with times in seconds, a type (text, search, image, file), turns, and blocks of 16 tokens.

Turns arrive at the recorded times, not relative to the previous turn. The last, partly filled block has the
recorded hash, which covers the first output token, so it never matches another request's. A hash of the
tokens after the prompt may follow and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..arrival import Arrival
from .rows import Source, json_rows

BLOCK = 16
MARK = "chat_id"  # the key that distinguishes these lines from Mooncake's


def read(source: Source) -> Iterator[Arrival]:
    """Read requests of class `type`, with `chat_id` as their key."""
    for row in json_rows(source):
        with source.skipped:
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
