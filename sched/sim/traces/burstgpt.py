"""BurstGPT: whole seconds since midnight of the first day, so that ties are real; columns by name, since later
releases put `Session ID` and `Elapsed time` between the others."""

from __future__ import annotations

from collections.abc import Iterator

from ..arrival import Arrival
from .rows import Source, csv_rows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(source: Source) -> Iterator[Arrival]:
    """A class is model and kind of log, as `ChatGPT/Conversation log`.

    `Response tokens` 0 marks a request that failed (then `Request tokens` may be 0 too): left out, and their number
    told; or kept, as at least one token each, where asked for.
    """
    failed = total = 0
    for row in csv_rows(source):
        total += 1
        output = row.tokens(COLUMNS[2], least=0)
        failed += output == 0
        least = 1 if output else 0
        time, prompt = row.number(COLUMNS[0]), row.tokens(COLUMNS[1], least)
        if output or source.keep_failed:
            kind = "/".join(filter(None, (row.cells.get("Model"), row.cells.get("Log Type"))))
            yield Arrival(time, max(1, prompt), max(1, output), source.slo, kind)
    if failed:
        done = "kept as one token each" if source.keep_failed else "left out"
        source.tell(f"{source.path}: {failed} of {total} requests failed (no response tokens) and are {done}")
