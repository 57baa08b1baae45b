"""ServeGen: requests drawn from measured statistics of clients.

A folder holds two files per client, optionally gzipped. `chunk-N-trace.csv` has no header and a row per window
of 600 s: start, requests per second, coefficient of variation of the gaps, name of the fitted distribution and
its two parameters. `chunk-N-dataset.json` has tables of lengths per window of 21,600 s, as strings that hold
`{tokens: probability}`. Language models have `input_tokens` and `output_tokens`. Reasoning models also have
`reason_ratio`, the share of the output that is thinking. Multimodal models have `text_tokens` and, for images,
audio and video, a count and the tokens per item.

Each window gets the measured number of requests, a fraction being rounded at random. Gaps have the named
distribution and the measured variation, and are stretched to fill the window. Lengths are drawn independently
of each other, as published. The parameters of the distribution are not used: those of Weibull imply another
rate and variation than the other columns.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from math import exp, floor, inf, isfinite, lgamma, log
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from ...api.errors import InvalidValue
from ...api.perf import Array
from ...api.slo import SLO
from ..arrival import Arrival
from ..draws import MAX_PROMPT
from .rows import Tell

WINDOW = 600  # seconds per row of a client's trace
EPOCH = 21_600  # seconds per entry of a client's tables
MEDIA = ("image", "audio", "video")
_CLIENT = re.compile(r"chunk-(\d+)-trace\.csv(\.gz)?")


class _Activity(NamedTuple):
    """The activity of a client in one window."""

    rate: float
    cv: float
    pattern: str


class _Drawn(NamedTuple):
    """Requests drawn for one client in one window."""

    times: Array
    prompts: Array
    outputs: Array
    thoughts: Array


def draw(
    folder: Path, slo: SLO, seed: int, start: float, end: float, count: int | None, tell: Tell
) -> Iterator[Arrival]:
    """Draw the requests in [start, end) seconds of the folder's windows, in order of time, at most `count`.

    Raises InvalidValue for malformed files, and if neither an end nor a count is given, since that would
    draw millions of requests.
    """
    clients = [_Client(int(match[1]), path) for path in folder.iterdir() if (match := _CLIENT.fullmatch(path.name))]
    if not clients:
        raise InvalidValue(
            f"{folder} has no chunk-N-trace.csv; it must be the folder of one model, such as data/reason/deepseek-r1",
            "workload",
        )
    clients.sort(key=lambda client: client.number)
    last = max(max(client.activity, default=0) for client in clients)
    if count is None and end == inf:
        described = WINDOW * sum(row.rate for client in clients for row in client.activity.values())
        raise InvalidValue(
            f"{folder} describes {described:,.0f} requests of {len(clients)} clients: give the number to draw, or a "
            "duration",
            "num_prompts",
        )
    drawn = 0
    for window in range(int(start // WINDOW) * WINDOW, last + 1, WINDOW):
        if window >= end or drawn == count:
            break
        for arrival in _window(clients, window, seed, slo):
            if start <= arrival.time < end and drawn != count:
                drawn += 1
                yield arrival
    tell(f"{folder}: {drawn} requests drawn with seed {seed} from the statistics of {len(clients)} clients")


def _window(clients: list[_Client], window: int, seed: int, slo: SLO) -> Iterator[Arrival]:
    active = [client for client in clients if client.activity.get(window, _IDLE).rate > 0]
    drawn = [client.draw(window, np.random.default_rng((seed, window, client.number))) for client in active]
    if not drawn:
        return
    columns = (np.concatenate(column) for column in zip(*drawn, strict=True))
    times, prompts, outputs, thoughts = columns
    names = np.repeat([client.number for client in active], [len(part.times) for part in drawn])
    for place in np.argsort(times, kind="stable"):
        yield Arrival(
            float(times[place]),
            int(prompts[place]),
            int(outputs[place]),
            slo,
            f"client-{names[place]}",
            thinking_tokens=int(thoughts[place]),
        )


_IDLE = _Activity(0.0, 0.0, "")


class _Client:
    """The files of one client. Tables are parsed when first needed."""

    def __init__(self, number: int, trace: Path) -> None:
        self.number = number
        self.activity = _read_activity(trace)
        self._path = _dataset(trace, number)
        self._epochs: Mapping[str, object] | None = None
        self._tables: dict[tuple[int, str], tuple[Array, Array]] = {}

    def draw(self, window: int, random: np.random.Generator) -> _Drawn:
        row, epoch = self.activity[window], window // EPOCH * EPOCH
        count = floor(row.rate * WINDOW + random.random())
        times = window + _times(row, random, count)
        fields = self._fields(epoch)
        if "input_tokens" in fields:
            prompts = self._values(epoch, "input_tokens", random, count)
        else:
            prompts = self._values(epoch, "text_tokens", random, count)
            for medium in MEDIA:
                prompts += self._media(epoch, medium, random, count)
        outputs = self._values(epoch, "output_tokens", random, count, least=1)
        thoughts = np.zeros(count)
        if "reason_ratio" in fields:
            thoughts = np.rint(outputs * self._values(epoch, "reason_ratio", random, count))
        return _Drawn(times, prompts.clip(1, MAX_PROMPT - 1), outputs, thoughts.clip(0, outputs))

    def _media(self, epoch: int, medium: str, random: np.random.Generator, count: int) -> Array:
        """Draw the tokens of all items of a medium per request: their number, then the tokens of each."""
        if f"{medium}_count" not in self._fields(epoch):
            return np.zeros(count)
        each = self._values(epoch, f"{medium}_count", random, count).astype(int)
        tokens = np.concatenate([[0.0], np.cumsum(self._values(epoch, f"{medium}_tokens", random, int(each.sum())))])
        ends = np.cumsum(each)
        summed: Array = tokens[ends] - tokens[ends - each]
        return summed

    def _values(self, epoch: int, field: str, random: np.random.Generator, count: int, least: float = 0) -> Array:
        """Draw `count` values of a table that are at least `least`."""
        if (epoch, field) not in self._tables:
            self._tables[epoch, field] = self._table(epoch, field, least)
        values, cumulative = self._tables[epoch, field]
        places = np.searchsorted(cumulative, random.random(count), side="right")
        drawn: Array = values[places.clip(max=len(values) - 1)]
        return drawn

    def _table(self, epoch: int, field: str, least: float) -> tuple[Array, Array]:
        where, text = f"{self._path}: window {epoch}: {field!r}", self._fields(epoch).get(field)
        try:
            table = ast.literal_eval(text) if isinstance(text, str) else None
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise InvalidValue(f"{where}: not a table of probabilities ({error})", "workload") from error
        numbers = (int, float)
        if not isinstance(table, dict) or not all(
            isinstance(x, numbers) and isfinite(x) and x >= 0 for pair in table.items() for x in pair
        ):
            raise InvalidValue(
                f"{where}: must be a string with a table {{tokens: probability}}, none negative", "workload"
            )
        pairs = sorted((value, share) for value, share in table.items() if value >= least)
        total = sum(share for _, share in pairs)
        if total <= 0:
            raise InvalidValue(f"{where}: the table is empty, but the client sent requests then", "workload")
        values, shares = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
        return values, np.cumsum(shares / total)

    def _fields(self, epoch: int) -> Mapping[str, object]:
        if self._epochs is None:
            self._epochs = _read_json(self._path)
        fields = self._epochs.get(str(epoch))
        if not isinstance(fields, dict):
            raise InvalidValue(f"{self._path}: no tables for the window {epoch}, in which the client sent requests")
        return fields


def _times(row: _Activity, random: np.random.Generator, count: int) -> Array:
    """Draw `count` times in a window, ascending."""
    if row.pattern == "Weibull":
        gaps = random.weibull(_weibull_shape(row.cv), count + 1)
    else:
        gaps = random.gamma(row.cv**-2, 1.0, count + 1)
    total = float(gaps.sum())
    if not total > 0:  # gaps so uneven that all round to 0
        gaps, total = np.ones(count + 1), count + 1.0
    times: Array = np.cumsum(gaps[:-1]) * (WINDOW / total)
    return times.clip(max=np.nextafter(WINDOW, 0))


def _weibull_shape(cv: float) -> float:
    """Find the shape of the Weibull distribution with this coefficient of variation, by bisection."""
    low, high = log(0.05), log(100.0)
    for _ in range(60):
        middle = (low + high) / 2
        shape = exp(middle)
        squared = exp(lgamma(1 + 2 / shape) - 2 * lgamma(1 + 1 / shape)) - 1
        low, high = (middle, high) if squared > cv**2 else (low, middle)
    return exp(low)


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _dataset(trace: Path, number: int) -> Path:
    for name in (f"chunk-{number}-dataset.json", f"chunk-{number}-dataset.json.gz"):
        if (trace.parent / name).is_file():
            return trace.parent / name
    raise InvalidValue(f"{trace} has no chunk-{number}-dataset.json beside it", "workload")


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        with _open(path) as file:
            epochs = json.load(file)
    except json.JSONDecodeError as error:
        raise InvalidValue(f"{path}:{error.lineno}: column {error.colno}: not JSON ({error.msg})") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path}: {error}", "workload") from error
    if not isinstance(epochs, dict):
        raise InvalidValue(f"{path}: must be a JSON object of windows", "workload")
    return epochs


def _read_activity(path: Path) -> dict[int, _Activity]:
    """Read a client's trace by start of the window."""
    rows: dict[int, _Activity] = {}
    try:
        with _open(path) as file:
            for line, cells in enumerate(csv.reader(file), 1):
                if cells:
                    start, row = _activity(f"{path}:{line}", cells)
                    if start in rows:
                        raise InvalidValue(f"{path}:{line}: column 1: window {start} is given twice", "workload")
                    rows[start] = row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidValue(f"{path}: {error}", "workload") from error
    return rows


def _activity(where: str, cells: list[str]) -> tuple[int, _Activity]:
    if len(cells) != 6:
        raise InvalidValue(f"{where}: {len(cells)} columns, but a ServeGen window has 6", "workload")
    numbers = []
    for column in (0, 1, 2):
        try:
            number = float(cells[column])
        except ValueError:
            number = -1.0
        if not 0 <= number < inf:
            raise InvalidValue(
                f"{where}: column {column + 1}: {cells[column]!r} must be a number, 0 or more", "workload"
            )
        numbers.append(number)
    start, rate, cv = numbers
    pattern = cells[3]
    for column, ok, allowed in (
        (1, start % WINDOW == 0, f"a multiple of {WINDOW} s"),
        (3, cv > 0 or rate == 0, "more than 0 if there are requests"),
        (4, pattern in ("Gamma", "Weibull") or (rate == 0 and not pattern), "Gamma or Weibull"),
    ):
        if not ok:
            raise InvalidValue(f"{where}: column {column}: {cells[column - 1]!r} must be {allowed}", "workload")
    return int(start), _Activity(rate, cv, pattern)
