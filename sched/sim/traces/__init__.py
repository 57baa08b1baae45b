"""Workloads from files: public production traces in their original formats, and a plain CSV.

Supported are CSV files (Azure LLM inference 2023 and 2024, BurstGPT, vidur, SplitwiseSim, plain CSV) and JSON
lines or lists (Mooncake, Qwen-Bailian), optionally gzipped. The format is detected from the first line, and
columns by name. A folder of ServeGen's client files is drawn from. Times count from the first request. Rows may
be in any order and are sorted by time; the sort is stable. Rows that cannot be used are skipped and counted; a
file without any other is refused, with file, line and column.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TextIO

from ...api.errors import InvalidValue
from ...api.slo import SLO
from ..arrival import DEFAULT_SLO, Arrival, scale
from . import azure, burstgpt, mooncake, plain, qwen, servegen
from .rows import Source, Tell
from .skipped import Skipped

__all__ = ["load_trace"]

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
    start: float = 0.0,
    duration: float | None = None,
    keep_failed: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> list[Arrival]:
    """Read a trace, ordered by arrival. The first request arrives at 0.

    slo: for requests without one in their row.
    start, duration: only take requests in this interval of the trace, in seconds from its first request
        (ServeGen: from its first window).
    num_prompts: only take the first of these.
    time_scale multiplies arrival times; prompt_scale and output_scale divide lengths.
    spread: distribute requests with equal timestamps evenly over this many seconds, or up to the next
        timestamp if that is sooner (Mooncake's timestamps cover about 3 s, BurstGPT's 1 s). 0 keeps them.
    keep_failed: include BurstGPT's failed requests.
    seed: for random draws (only ServeGen).
    tell: called with sentences about rows left out or skipped, equal timestamps and draws.

    Raises InvalidValue.
    """
    if num_prompts is not None and num_prompts < 1:
        raise InvalidValue(f"{num_prompts=} must be at least 1", "num_prompts")
    for name, value in (("spread", spread), ("start", start)):
        if not 0 <= value < inf:
            raise InvalidValue(f"{name}={value!r} must be 0 or more seconds", name)
    if duration is not None and not duration > 0:
        raise InvalidValue(f"{duration=} must be more than 0 seconds", "duration")
    path, tell, end = Path(path), tell or _ignore, inf if duration is None else start + duration
    if path.is_dir():
        read: Iterable[Arrival] = servegen.draw(path, slo, seed, start, end, num_prompts, tell)
        arrivals = list(_count(read, progress))
    else:
        arrivals = _from_file(path, slo, keep_failed, progress, tell)
        if arrivals:
            origin = arrivals[0].time
            arrivals = [arrival for arrival in arrivals if start <= arrival.time - origin < end]
    if not arrivals:
        raise InvalidValue(
            f"{path}: the trace has no requests{'' if end == inf and not start else ' in that interval'}", "workload"
        )
    arrivals = _spread(arrivals, spread) if spread else arrivals
    first = arrivals[0].time
    arrivals = [replace(arrival, time=arrival.time - first) for arrival in arrivals[:num_prompts]]
    return scale(arrivals, time=time_scale, prompt=prompt_scale, output=output_scale)


def _ignore(sentence: str) -> None:
    pass


def _from_file(path: Path, slo: SLO, keep_failed: bool, progress: Progress | None, tell: Tell) -> list[Arrival]:
    """Read a whole file, sorted by time."""
    skipped = Skipped(path, "workload")
    try:
        with _open(path) as file:
            arrivals = list(_count(_read(path, file, slo, keep_failed, tell, skipped), progress))
    except FileNotFoundError as error:
        raise InvalidValue(f"trace {path} does not exist", "workload") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path}: {error}", "workload") from error
    skipped.check()
    if sentence := skipped.sentence():
        tell(sentence)
    arrivals.sort(key=lambda arrival: arrival.time)
    distinct = len({arrival.time for arrival in arrivals})
    if 2 * distinct < len(arrivals):
        tell(f"{path}: {len(arrivals)} requests share {distinct} timestamps; `spread` would separate them")
    return arrivals


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _count(arrivals: Iterable[Arrival], progress: Progress | None) -> Iterator[Arrival]:
    for done, arrival in enumerate(arrivals, 1):
        if progress is not None and done % 10_000 == 0:
            progress(done, 0)
        yield arrival


def _read(path: Path, file: TextIO, slo: SLO, keep_failed: bool, tell: Tell, skipped: Skipped) -> Iterator[Arrival]:
    first = file.readline()
    if first.lstrip().startswith("["):
        first += file.read()
    is_json = first.lstrip().startswith(("{", "["))
    header = [] if is_json else _header(path, first)
    source = Source(path, first, header, file, slo, keep_failed, tell, skipped)
    if is_json:
        return qwen.read(source) if f'"{qwen.MARK}"' in first else mooncake.read(source)
    known = (
        (azure.COLUMNS, azure.read),
        (burstgpt.COLUMNS, burstgpt.read),
        *((columns, plain.read) for columns in (plain.NEEDED, plain.VIDUR, plain.SPLITWISE)),
    )
    for columns, read in known:
        if set(columns) <= set(header):
            return read(source)
    raise InvalidValue(
        f"{path}:1: columns {str(header)[:300]} match no known format: Azure has {', '.join(azure.COLUMNS)}; "
        f"BurstGPT has {', '.join(burstgpt.COLUMNS)}; plain CSV has {', '.join(plain.NEEDED)} and may have "
        f"{', '.join(plain.COLUMNS[4:])}; vidur has {', '.join(plain.VIDUR)}; SplitwiseSim has "
        f"{', '.join(plain.SPLITWISE)}; Mooncake and Qwen-Bailian have JSON lines; ServeGen is a folder",
        "workload",
    )


def _header(path: Path, line: str) -> list[str]:
    """Return the names of the columns, without the spaces that some files have around them."""
    try:
        return [name.strip() for name in next(csv.reader([line]), [])]
    except csv.Error as error:
        raise InvalidValue(f"{path}:1: {error}", "workload") from error


def _spread(arrivals: list[Arrival], seconds: float) -> list[Arrival]:
    """Spread sorted arrivals with equal times evenly."""
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
