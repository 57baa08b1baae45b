"""Rows of published files that cannot be used: skipped and counted, with the reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

from ...api.errors import InvalidValue

GIVE_UP = 10_000  # rows from the first on of which none can be used: the file is another one
_SHOWN = 3  # reasons in the summary
_LONGEST = 200  # characters of a reason


class Unusable(InvalidValue):
    """A row that cannot be used. `reason` is the message without place and value."""

    def __init__(self, message: str, param: str | None, reason: str) -> None:
        super().__init__(message, param)
        self.reason = reason


class Skipped:
    """Counts rows: used where its `with` block ends normally, skipped where that raises Unusable."""

    def __init__(self, path: Path, param: str) -> None:
        """param: names the file in errors."""
        self._path = path
        self._param = param
        self._used = 0
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, Unusable):
            self.add(error)
            return True
        self._used += error is None
        return False

    def add(self, error: Unusable) -> None:
        """Count a row that cannot be used. Raises InvalidValue once the file has nothing but such rows."""
        if error.reason in self._first or len(self._first) < _SHOWN:
            self._first.setdefault(error.reason, str(error)[:_LONGEST])
        self._counts[error.reason if error.reason in self._first else ""] += 1
        if self._counts.total() >= GIVE_UP:
            self.check("first ")

    def check(self, which: str = "") -> None:
        """Raise InvalidValue if there are rows, and none can be used."""
        if self._counts and not self._used:
            raise InvalidValue(
                f"{self._path}: none of its {which}{self._counts.total()} rows can be used: {self._why()}", self._param
            )

    def sentence(self) -> str:
        """Return how many rows were skipped and why, in one line; empty if none was, or if no row is left."""
        skipped = self._counts.total()
        if not skipped or not self._used:
            return ""
        total = skipped + self._used
        return f"{self._path}: {skipped} of the {total} rows read cannot be used and are skipped: {self._why()}"

    def _why(self) -> str:
        reasons = [f"{self._counts[reason]} as {first}" for reason, first in self._first.items()]
        return "; ".join(reasons + [f"{self._counts['']} for other reasons"] * ("" in self._counts))
