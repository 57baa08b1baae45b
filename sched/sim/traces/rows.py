"""Rows of a trace, and readers for their cells with errors that name the position."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from ...api.errors import InvalidValue
from ...api.slo import SLO
from ..draws import MAX_PROMPT

_TIMESTAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(\.\d+)?(?:Z|([+-])(\d\d):?(\d\d))?")

Tell = Callable[[str], None]


class Source(NamedTuple):
    """An open trace, after its first line was read."""

    path: Path
    first: str
    header: Sequence[str]  # column names if it is a CSV
    file: TextIO
    slo: SLO  # for requests without one in their row
    keep_failed: bool
    tell: Tell  # called with sentences about what the reader did with the file


class Row(NamedTuple):
    """One line of a trace."""

    where: str
    cells: Mapping[str, Any]

    def fail(self, column: str, allowed: str) -> NoReturn:
        raise InvalidValue(f"{self.where}: column {column!r}: {self.cells.get(column)!r} must be {allowed}", "workload")

    def tokens(self, column: str, least: int = 1) -> int:
        """Read a length: a whole number of at least `least`."""
        value = self.cells.get(column)
        try:
            count = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
        except ValueError:
            count = -1
        if not least <= count < MAX_PROMPT:
            self.fail(column, f"a whole number of tokens, {least} to {MAX_PROMPT - 1}")
        return count

    def number(self, column: str, default: float | None = None, *, positive: bool = False) -> float:
        """Read seconds, or another unit of the format: 0 or more, or more than 0 if `positive`."""
        value = self.cells.get(column)
        if default is not None and value in (None, ""):
            return default
        try:
            number = float("nan") if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not isfinite(number) or number < 0 or (positive and number == 0):
            self.fail(column, "a positive number" if positive else "a number, 0 or more")
        return number

    def timestamp(self, column: str, epoch: datetime) -> float:
        """Read a time in seconds since `epoch`, with any number of fractional digits. Without a zone it is UTC."""
        value = self.cells.get(column)
        match = _TIMESTAMP.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            self.fail(column, "a time such as 2023-11-16 18:15:46.6805900 or 2024-05-12 01:00:00+00:00")
        *parts, fraction, sign, hours, minutes = match.groups()
        year, month, day, hour, minute, second = map(int, parts)
        try:
            whole = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
        except ValueError as error:
            self.fail(column, f"a time that exists ({error})")
        if sign:
            offset = timedelta(hours=int(hours), minutes=int(minutes))
            whole = whole - offset if sign == "+" else whole + offset
        return (whole - epoch).total_seconds() + float(fraction or 0)

    def names(self, column: str, most: int, length: int) -> tuple[int, ...]:
        """Read the block hashes of a prompt of `length` tokens: at most `most` whole numbers."""
        names = self.cells.get(column, [])
        if not isinstance(names, list) or not all(type(name) is int and name >= 0 for name in names):
            self.fail(column, "a list of whole numbers")
        if len(names) > most:
            self.fail(column, f"at most {most} blocks for {length} tokens")
        return tuple(names)


def csv_rows(source: Source) -> Iterator[Row]:
    """Yield the rows after the header."""
    reader = csv.reader(source.file)
    try:
        for cells in reader:
            where = f"{source.path}:{reader.line_num + 1}"
            if not cells:
                continue
            if len(cells) != len(source.header):
                raise InvalidValue(
                    f"{where}: {len(cells)} columns, but the first line names {len(source.header)}", "workload"
                )
            yield Row(where, dict(zip(source.header, cells, strict=True)))
    except csv.Error as error:
        raise InvalidValue(f"{source.path}:{reader.line_num + 1}: {error}", "workload") from error


def json_rows(source: Source) -> Iterator[Row]:
    """Yield all lines, the first one included. Each must be a JSON object."""
    for number, line in enumerate((source.first, *source.file), 1):
        if not line.strip():
            continue
        where = f"{source.path}:{number}"
        try:
            cells = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{where}: column {error.colno}: not JSON ({error.msg})", "workload") from error
        if not isinstance(cells, dict):
            raise InvalidValue(f"{where}: {line.strip()[:40]!r} must be a JSON object", "workload")
        yield Row(where, cells)
