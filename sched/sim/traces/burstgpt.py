"""BurstGPT: times in whole seconds since midnight of the first day, so that equal timestamps are common.

Columns are found by name, since later releases insert `Session ID` and `Elapsed time`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..arrival import Arrival
from .rows import Source, csv_rows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(source: Source) -> Iterator[Arrival]:
    """Read requests. Their class is model and kind of log, as `ChatGPT/Conversation log`.

    `Response tokens` of 0 marks a failed request, with `Request tokens` of 0 or more. Failed requests are left
    out and reported, or kept with at least one token each if `keep_failed` is set.
    """
    failed = total = 0
    for row in csv_rows(source):
        with source.skipped:
            output = row.tokens(COLUMNS[2], least=0)
            time, prompt = row.number(COLUMNS[0]), row.tokens(COLUMNS[1], 1 if output else 0)
            total += 1
            failed += output == 0
            if output or source.keep_failed:
                kind = "/".join(filter(None, (row.cells.get("Model"), row.cells.get("Log Type"))))
                yield Arrival(time, max(1, prompt), max(1, output), source.slo, kind)
    if failed:
        done = "kept as one token each" if source.keep_failed else "left out"
        source.tell(f"{source.path}: {failed} of {total} requests failed (no response tokens) and are {done}")
