"""Where a Scheduler writes what it was told and what it planned; journal.py keeps it."""

from __future__ import annotations

from typing import Any, Protocol


class Log(Protocol):
    """Takes one input, or one plan, of one instance."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


def no_log(kind: str, **fields: Any) -> None:
    """Keeps nothing."""
