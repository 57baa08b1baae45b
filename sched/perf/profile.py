"""Profiling before serving: decode by rows and context, prompt chunks by size and prefix, and mixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from statistics import median
from typing import NamedTuple

from ..api.acceptance import draft_lengths
from ..api.executor import Executor
from ..api.params import SamplingParams
from ..api.perf import Load
from ..api.plan import Begin, Span, StepPlan, StepResult
from ..api.policy import Limits
from .buckets import Buckets
from .fit import kind

Point = tuple[Load, float]  # a load and its seconds
Progress = Callable[[float], None]  # called with the share that is done
RUNS = 3  # most runs of each step
LONG = 1 / 500  # of the time budget: if the first run of a step takes longer, it counts, and the step is not repeated
TOO_LONG = 1 / 20  # likewise, for the first run of a program, which is slower because everything is cold
SIZES = 5  # decode and mixed sizes that are measured without padding
FIRST = 4  # probes that are measured even without time: the smallest step of each kind


class Row(NamedTuple):
    """The part of a request in a probe: `length` new tokens after `start` computed ones."""

    start: int
    length: int
    draft: int = 0


class Probe(NamedTuple):
    """A step to measure."""

    rows: tuple[Row, ...]
    decode: int  # number of decodes, which are the first rows

    @property
    def load(self) -> Load:
        load = Load()
        for row in self.rows[: self.decode]:
            load = load.add_rows(row.length, row.start, row.start)._replace(drafts=row.draft)
        for row in self.rows[self.decode :]:
            load = load.add_chunk(row.length, row.start)
        return load


def probes(limits: Limits, max_model_len: int, buckets: Buckets) -> list[Probe]:
    """List the steps to measure, the most informative first, with kinds interleaved.

    Each compiled size (or SIZES sizes if there are none) is measured at short and at long contexts.
    """
    room = limits.pages * limits.page_size
    longest = min(max_model_len, room) - 1
    decode, mixed = _sizes(buckets.decode, limits.rows), _sizes(buckets.mixed, limits.tokens)
    tokens = [size for size in mixed if size < longest] or [max(1, longest - 1)]
    kinds: list[list[Probe | None]] = [
        [_decode(rows, share, longest, limits) for rows, share in _spread(decode)],
        [_chunk(0, size, share, longest, limits) for size, share in _spread(tokens)],
        [_chunk(max(1, size // 8), size, share, longest, limits) for size, share in _spread(tokens) if size > 1],
        list(_drafting(limits, max_model_len)),
    ]
    mixture = chain.from_iterable(zip_longest(*kinds))
    return list(dict.fromkeys(probe for probe in mixture if probe is not None))


def _sizes(compiled: Sequence[int], most: int) -> list[int]:
    """Return the compiled sizes within the limit, or a geometric series up to it, from 1 or 64."""
    if compiled:
        return [size for size in compiled if size < most] + [most]
    first = 1 if most <= 256 else 64
    factor = max(2.0, (most / first) ** (1 / (SIZES - 1)))
    return sorted({min(most, round(first * factor**step)) for step in range(SIZES)})


def _spread(sizes: Sequence[int]) -> list[tuple[int, float]]:
    """List (size, share of the longest context), the extremes first, then values between."""
    first = [(sizes[0], 0.0), (sizes[-1], 1.0), (sizes[-1], 0.0), *((size, 0.5) for size in reversed(sizes[1:-1]))]
    rest = [(size, share) for share in (1.0, 0.0, 0.5) for size in sizes]
    return list(dict.fromkeys(first + rest))


def _decode(rows: int, share: float, longest: int, limits: Limits) -> Probe | None:
    """Make a probe of decodes with equal contexts, as long as the pool allows for large shares."""
    own = (limits.pages // rows) * limits.page_size - 1
    context = min(64 + int(share * longest), longest, own)
    return None if context < 1 else Probe((Row(context, 1),) * rows, rows)


def _chunk(rows: int, tokens: int, share: float, longest: int, limits: Limits) -> Probe | None:
    """Make a probe of a chunk that fills a step of `tokens` beside decodes, after a prefix."""
    rows = min(rows, limits.rows - 1)
    size = tokens - rows
    prefix = int(share * max(0, longest - size)) // limits.page_size * limits.page_size
    pages = limits.pages - -(-(prefix + size) // limits.page_size)
    if size < 1 or prefix + size > longest or (rows and pages < rows):
        return None
    context = min(64 + int(share * longest / 2), longest, pages // rows * limits.page_size - 1) if rows else 0
    if rows and context < 1:
        return None
    return Probe(((Row(context, 1),) * rows) + (Row(prefix, size),), rows)


def _drafting(limits: Limits, max_model_len: int) -> Iterator[Probe]:
    """Make probes of rows that draft each length. Numbers of rows between are interpolated, and learned."""
    position = min(64, max_model_len - 1 - limits.draft)
    pages = (position + limits.draft) // limits.page_size + 1
    for draft in draft_lengths(limits.draft) if limits.draft and position > 0 else ():
        for rows in sorted({1, min(8, limits.rows), limits.rows}):
            if rows * (1 + draft) <= limits.tokens and rows * pages <= limits.pages:
                yield Probe((Row(position, 1 + draft, draft),) * rows, rows)


def spans(probe: Probe, limits: Limits) -> tuple[Span, ...]:
    """Return the spans of a probe over an empty pool. They write garbage into pages that no request holds."""
    planned, page = [], 0
    for slot, (start, length, draft) in enumerate(probe.rows):
        prompt = start if slot < probe.decode else start + length
        pages = range(page, page + (start + length - 1) // limits.page_size + 1)
        page = pages.stop
        begin = Begin(SamplingParams(temperature=0.0), 0, (), (), prompt, ())
        tokens = (0,) * (length - draft)
        planned.append(Span(-1 - slot, slot, start, length, tuple(pages), tokens, draft, True, begin))
    return tuple(planned)


async def measure(
    executor: Executor,
    limits: Limits,
    max_model_len: int,
    buckets: Buckets,
    seconds: float,
    *,
    runs: int = RUNS,
    progress: Progress | None = None,
) -> list[Point]:
    """Measure as many probes as fit into `seconds`: each once, then again, up to `runs` times.

    The first FIRST probes are measured even if that takes longer. A probe that is expected to take more
    than the rest of the time is skipped, so that large chunks do not prevent decode and mixed steps from
    being measured. Returns (load, median seconds) per probe.
    """
    todo = probes(limits, max_model_len, buckets)
    times: dict[int, list[float]] = {}
    rates: dict[str, float] = {}  # largest seconds per padded token so far, by kind of step
    warm: set[int] = set()  # programs that have run
    began, step = executor.now(), 0
    for turn in range(runs):
        for index, probe in enumerate(todo):
            spent, load = executor.now() - began, probe.load
            program, placed = buckets.placed(load)
            padded = placed.tokens
            if progress is not None:
                progress(max(min(spent / seconds, 1.0), (turn * len(todo) + index) / (runs * len(todo))))
            must = turn == 0 and index < FIRST
            if not must and spent + padded * rates.get(kind(load), 0.0) > seconds:
                continue
            for counted in (turn > 0, True):
                step -= 1
                result = await executor.submit(StepPlan(step, spans(probe, limits)))
                assert isinstance(result, StepResult)
                took = result.finished - result.started
                if counted or took > seconds * (LONG if program in warm else TOO_LONG):
                    times.setdefault(index, []).append(took)
                    break
                warm.add(program)
            rates[kind(load)] = max(rates.get(kind(load), 0.0), took / padded)
    executor.release(sorted({slot for probe in todo for slot in range(len(probe.rows))}))
    return [(todo[index].load, median(durations)) for index, durations in sorted(times.items())]


def priced(loads: Iterable[Load], step_time: Callable[[Load], float]) -> list[Point]:
    """Return the points that profiling would give on a device with known step times."""
    return [(load, step_time(load)) for load in loads]
