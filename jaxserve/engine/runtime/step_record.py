"""A step as the flight recorder keeps it: small, since there are many."""

from __future__ import annotations

from array import array
from typing import NamedTuple


class Step(NamedTuple):
    """A step, or the part of it until it was stopped."""

    instance: str
    start: float
    end: float
    stopped: bool
    chunks: tuple[tuple[int, int, int, bool], ...]  # of prompts: request, start, length, samples
    rows: bytes  # requests of the running decodes, 4 bytes each
    drafts: bytes  # tokens drafted for each of them, 4 bytes each; b"" if none
    context: int  # longest of the running decodes

    @property
    def spans(self) -> int:
        """The number of chunks and running decodes."""
        return len(self.chunks) + len(self.rows) // 4

    def chunks_of(self, id: int) -> tuple[tuple[int, int, int, bool], ...]:
        """Return the chunks of one request."""
        return tuple(chunk for chunk in self.chunks if chunk[0] == id)

    def alone(self, id: int) -> Step:
        """Return the step with what it has of one request only."""
        rows = array("i", self.rows)
        at = rows.index(id) if id in rows else None
        if at is None:
            return self._replace(chunks=self.chunks_of(id), rows=b"", drafts=b"")
        row = slice(4 * at, 4 * at + 4)
        return self._replace(chunks=self.chunks_of(id), rows=self.rows[row], drafts=self.drafts[row])

    def empty(self) -> Step:
        """Return the step without any request."""
        return self._replace(chunks=(), rows=b"", drafts=b"")
