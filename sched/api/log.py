"""The interface through which a Scheduler records its inputs and plans. journal.py implements it."""

from __future__ import annotations

from typing import Any, Protocol


class Log(Protocol):
    """A sink for the inputs and plans of one instance."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


def no_log(kind: str, **fields: Any) -> None:
    """Discard the record."""
