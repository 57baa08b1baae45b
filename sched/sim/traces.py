"""Workloads from files: public production traces in upstream's own formats, and a plain CSV.

Read: Azure LLM inference 2023 and 2024 (CSV), Mooncake (JSON lines), plain CSV with the columns `id, arrival_s,
input_tokens, output_tokens, ttft_slo_s, tpot_slo_s, class`; each plain or gzipped. The format is told by the first
line, columns by their names. Times are counted from the first request; what is malformed is named by file, line
and column.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from ..errors import InvalidValue
from ..slo import SLO
from .workload import DEFAULT_SLO, MAX_PROMPT, Arrival, scale

MOONCAKE_BLOCK = 512  # tokens that one of `hash_ids` names

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
PLAIN = ("id", "arrival_s", "input_tokens", "output_tokens", "ttft_slo_s", "tpot_slo_s", "class")
NEEDED = PLAIN[:4]

_TIMESTAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(\.\d+)?(?:Z|([+-])(\d\d):?(\d\d))?")

Progress = Callable[[int, int], None]


def load_trace(
    path: str | Path,
    *,
    slo: SLO = DEFAULT_SLO,
    num_prompts: int | None = None,
    time_scale: float = 1.0,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    spread: float = 0.0,
    progress: Progress | None = None,
) -> list[Arrival]:
    """Read a trace, ordered by arrival; the first arrives at 0.

    slo: for requests to which the file gives none. num_prompts: the first so many. Arrival times are multiplied by
    time_scale, lengths divided by prompt_scale and output_scale. spread: requests of one timestamp are spread
    evenly over so many seconds, or up to the next timestamp where that is sooner (Mooncake gives requests of about
    3 s one timestamp); 0 leaves them together, as in the file. Raises InvalidValue.
    """
    if num_prompts is not None and num_prompts < 1:
        raise InvalidValue(f"{num_prompts=} must be at least 1", "num_prompts")
    if not 0 <= spread < float("inf"):
        raise InvalidValue(f"{spread=} must be 0 or more seconds", "spread")
    path = Path(path)
    try:
        with _open(path) as file:
            arrivals = list(_count(_read(path, file, slo), progress))
    except FileNotFoundError as error:
        raise InvalidValue(f"trace {path} does not exist", "workload") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path}: {error}", "workload") from error
    if not arrivals:
        raise InvalidValue(f"{path}: no requests in it", "workload")
    arrivals.sort(key=lambda arrival: arrival.time)
    arrivals = _spread(arrivals, spread) if spread else arrivals
    first = arrivals[0].time
    arrivals = [replace(arrival, time=arrival.time - first) for arrival in arrivals[:num_prompts]]
    return scale(arrivals, time=time_scale, prompt=prompt_scale, output=output_scale)


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _count(arrivals: Iterator[Arrival], progress: Progress | None) -> Iterator[Arrival]:
    for done, arrival in enumerate(arrivals, 1):
        if progress is not None and done % 10_000 == 0:
            progress(done, 0)
        yield arrival


def _read(path: Path, file: TextIO, slo: SLO) -> Iterator[Arrival]:
    first = file.readline()
    if first.lstrip().startswith("{"):
        return _mooncake(path, first, file, slo)
    header = next(csv.reader([first]), [])
    if set(AZURE) <= set(header):
        return _azure(path, header, file, slo)
    if set(NEEDED) <= set(header):
        return _plain(path, header, file, slo)
    raise InvalidValue(
        f"{path}:1: columns {header!r} are of no known format: Azure has {', '.join(AZURE)}; plain CSV has "
        f"{', '.join(NEEDED)} and may have {', '.join(PLAIN[4:])}; Mooncake has JSON lines",
        "workload",
    )


class _Row(NamedTuple):
    """One line, and how to read its cells with errors that say where they are."""

    where: str
    cells: Mapping[str, Any]

    def fail(self, column: str, allowed: str) -> NoReturn:
        raise InvalidValue(f"{self.where}: column {column!r}: {self.cells.get(column)!r} must be {allowed}", "workload")

    def tokens(self, column: str) -> int:
        """A length: a whole number of at least 1."""
        value = self.cells.get(column)
        try:
            count = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else 0
        except ValueError:
            count = 0
        if not 1 <= count < MAX_PROMPT:
            self.fail(column, f"a whole number of tokens, 1 to {MAX_PROMPT - 1}")
        return count

    def number(self, column: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self.cells.get(column)
        if default is not None and value in (None, ""):
            return default
        try:
            number = float("nan") if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not isfinite(number) or (positive and number <= 0):
            self.fail(column, "a positive number of seconds" if positive else "a number of seconds")
        return number

    def timestamp(self, column: str, epoch: datetime) -> float:
        """Seconds from `epoch` to a time with any number of fractional digits; without a zone it is UTC."""
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


def _rows(path: Path, header: Sequence[str], file: TextIO) -> Iterator[_Row]:
    reader = csv.reader(file)
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num + 1}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise InvalidValue(f"{where}: {len(cells)} columns, but the first line names {len(header)}", "workload")
            yield _Row(where, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise InvalidValue(f"{path}:{reader.line_num + 1}: {error}", "workload") from error


def _azure(path: Path, header: Sequence[str], file: TextIO, slo: SLO) -> Iterator[Arrival]:
    epoch = None
    for row in _rows(path, header, file):
        if epoch is None:  # near the data: seconds since 1970 would cost two of the seven digits
            zero = datetime(1970, 1, 1, tzinfo=UTC)
            epoch = zero + timedelta(seconds=int(row.timestamp(AZURE[0], zero)))
        yield Arrival(row.timestamp(AZURE[0], epoch), row.tokens(AZURE[1]), row.tokens(AZURE[2]), slo)


def _plain(path: Path, header: Sequence[str], file: TextIO, slo: SLO) -> Iterator[Arrival]:
    for row in _rows(path, header, file):
        promised = replace(
            slo,
            ttft=row.number("ttft_slo_s", slo.ttft, positive=True),
            tpot=row.number("tpot_slo_s", slo.tpot, positive=True),
        )
        yield Arrival(
            row.number("arrival_s"),
            row.tokens("input_tokens"),
            row.tokens("output_tokens"),
            promised,
            row.cells.get("class", ""),
            row.cells["id"],
        )


def _mooncake(path: Path, first: str, file: TextIO, slo: SLO) -> Iterator[Arrival]:
    for number, line in enumerate((first, *file), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            cells = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{where}: column {error.colno}: not JSON ({error.msg})", "workload") from error
        if not isinstance(cells, dict):
            raise InvalidValue(f"{where}: {line.strip()[:40]!r} must be a JSON object", "workload")
        row = _Row(where, cells)
        names = cells.get("hash_ids", [])
        if not isinstance(names, list) or not all(type(name) is int and name >= 0 for name in names):
            row.fail("hash_ids", "a list of whole numbers")
        length, output = row.tokens("input_length"), row.tokens("output_length")
        if len(names) > -(-length // MOONCAKE_BLOCK):
            row.fail("hash_ids", f"at most {-(-length // MOONCAKE_BLOCK)} blocks for {length} tokens")
        time = row.number("timestamp") / 1000
        yield Arrival(time, length, output, slo, hash_ids=tuple(names), block=MOONCAKE_BLOCK)


def _spread(arrivals: list[Arrival], seconds: float) -> list[Arrival]:
    """Sorted arrivals, with those of one time spread evenly."""
    spread: list[Arrival] = []
    start = 0
    while start < len(arrivals):
        time, end = arrivals[start].time, start
        while end < len(arrivals) and arrivals[end].time == time:
            end += 1
        width = min(seconds, arrivals[end].time - time) if end < len(arrivals) else seconds
        batch = arrivals[start:end]
        spread += [replace(arrival, time=time + width * i / len(batch)) for i, arrival in enumerate(batch)]
        start = end
    return spread
