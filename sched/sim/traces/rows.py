"""Rows of a trace, and readers for their cells with errors that name the position."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from ...api.slo import SLO
from ..draws import MAX_PROMPT
from .skipped import Skipped, Unusable

_TIMESTAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(\.\d+)?(?:Z|([+-])(\d\d):?(\d\d))?")

_LONGEST = 60  # characters of a value in a message
_OBJECT = "must be a JSON object"

Tell = Callable[[str], None]


class Source(NamedTuple):
    """An open trace, after its first line was read."""

    path: Path
    first: str  # the first line, or all of a JSON list
    header: Sequence[str]  # column names if it is a CSV
    file: TextIO
    slo: SLO  # for requests without one in their row
    keep_failed: bool
    tell: Tell  # called with sentences about what the reader did with the file
    skipped: Skipped


class Row(NamedTuple):
    """One line of a trace."""

    where: str
    cells: Mapping[str, Any]

    def fail(self, column: str, allowed: str) -> NoReturn:
        reason = f"must be {allowed}"
        value = repr(self.cells.get(column))
        value = value if len(value) <= _LONGEST else value[:_LONGEST] + "…"
        raise Unusable(f"{self.where}: column {column!r}: {value} {reason}", "workload", f"{column} {reason}")

    def tokens(self, column: str, least: int = 1) -> int:
        """Read a length: a whole number of at least `least`, also as 374.0, which pandas writes beside empty cells."""
        count = self._float(column)
        if not (least <= count < MAX_PROMPT and count.is_integer()):
            self.fail(column, f"a whole number of tokens, {least} to {MAX_PROMPT - 1}")
        return int(count)

    def number(self, column: str, default: float | None = None, *, positive: bool = False) -> float:
        """Read seconds, or another unit of the format: 0 or more, or more than 0 if `positive`."""
        value = self.cells.get(column)
        if default is not None and value in (None, ""):
            return default
        number = self._float(column)
        if not isfinite(number) or number < 0 or (positive and number == 0):
            self.fail(column, "a positive number" if positive else "a number, 0 or more")
        return number

    def _float(self, column: str) -> float:
        """Return a number, nan for anything else."""
        value = self.cells.get(column)
        try:
            return nan if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            return nan

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
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            source.skipped.add(Unusable(f"{source.path}:{reader.line_num + 1}: {error}", "workload", str(error)))
            continue
        if cells is None:
            return
        where = f"{source.path}:{reader.line_num + 1}"
        if cells and len(cells) != len(source.header):
            reason = f"but the first line names {len(source.header)}"
            source.skipped.add(Unusable(f"{where}: {len(cells)} columns, {reason}", "workload", reason))
        elif cells:
            yield Row(where, dict(zip(source.header, cells, strict=True)))


def json_rows(source: Source) -> Iterator[Row]:
    """Yield the objects of all lines, the first one included, or of a JSON list."""
    if source.first.lstrip().startswith("["):
        listed = _json(source.first, str(source.path))
        rows: Iterable[tuple[str, Any]] = ((f"{source.path}[{index}]", cells) for index, cells in enumerate(listed))
    else:
        rows = _json_lines(source)
    for where, cells in rows:
        if isinstance(cells, dict):
            yield Row(where, cells)
        else:
            source.skipped.add(Unusable(f"{where}: {str(cells)[:40]!r} {_OBJECT}", "workload", _OBJECT))


def _json_lines(source: Source) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(chain((source.first,), source.file), 1):
        if line.strip():
            where = f"{source.path}:{number}"
            try:
                cells = _json(line, where)
            except Unusable as error:
                source.skipped.add(error)
            else:
                yield where, cells


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Unusable(f"{where}: column {error.colno}: not JSON ({error.msg})", "workload", "not JSON") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deep nesting
        raise Unusable(f"{where}: not JSON that can be read ({error})", "workload", "not JSON") from error
