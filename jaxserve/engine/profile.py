"""Measures steps before serving, so that the first predictions are of this machine and not a guess.

A few dozen real steps over an empty pool: decode batches by size and context, prompt chunks by size. What they
write is garbage in pages that nobody holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from statistics import median

from jaxserve.sched.executor import Executor
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.perf.drafted import Drafted
from jaxserve.sched.perf.model import Load, PerfModel
from jaxserve.sched.perf.table import TableModel
from jaxserve.sched.plan import Begin, Span, StepPlan, StepResult
from jaxserve.sched.policies.drafting import lengths_of
from jaxserve.sched.policy import Limits

RUNS = 3  # of each load, after one that does not count
SECONDS = 1.5  # after so long the rest of the grid is left to the fit
Point = tuple[Load, float]


def grid(limits: Limits, max_model_len: int) -> tuple[list[int], list[int]]:
    """Batch sizes and context lengths of the table: powers of two up to the limits."""
    batches = [2**i for i in range(limits.rows.bit_length()) if 2**i <= limits.rows]
    lengths = [2**i for i in range(6, max_model_len.bit_length() + 1) if 2**i <= max(max_model_len, 128)]
    return (batches if len(batches) > 1 else [1, 2]), (lengths if len(lengths) > 1 else [64, 128])


def _plans(limits: Limits, max_model_len: int) -> Iterator[tuple[Load, list[Span]]]:
    """Loads to measure, the most telling first: big and small chunks, then decode batches far apart."""
    most = limits.pages * limits.page_size
    chunk = min(limits.tokens, max_model_len - 1, most)
    for length in sorted({chunk, max(1, chunk // 4)}, reverse=True):
        yield Load().add_chunk(length, 0), [_span(0, 0, length, range(-(-length // limits.page_size)))]
    batches, lengths = grid(limits, max_model_len)
    for context in (lengths[0], lengths[len(lengths) // 2], lengths[-1]):
        for batch in (batches[-1], batches[0], batches[len(batches) // 2]):
            position = min(context, max_model_len - 1)
            pages = position // limits.page_size + 1
            if batch > limits.rows or batch * pages > limits.pages:
                continue
            load, spans = Load(), []
            for row in range(batch):
                spans.append(_span(row, position, 1, range(row * pages, (row + 1) * pages)))
                load = load.add_decode(position)
            yield load, spans
    yield from _drafting(limits, max_model_len)


def _drafting(limits: Limits, max_model_len: int) -> Iterator[tuple[Load, list[Span]]]:
    """Rows that draft as much as they may, and one token: what lies between is interpolated, and learnt."""
    position = min(64, max_model_len - 1 - limits.draft)
    pages = (position + limits.draft) // limits.page_size + 1
    for draft in lengths_of(limits.draft) if limits.draft and position > 0 else ():
        for rows in sorted({1, min(8, limits.rows), limits.rows}):
            tokens = rows * (1 + draft)
            if tokens > limits.tokens or rows * pages > limits.pages:
                continue
            load = Load(decode=tokens, longest=position, context=rows * position, drafts=draft)
            held = [range(row * pages, (row + 1) * pages) for row in range(rows)]
            yield load, [_span(row, position, 1 + draft, mine, draft) for row, mine in enumerate(held)]


def _span(slot: int, start: int, length: int, pages: range, draft: int = 0) -> Span:
    begin = Begin(SamplingParams(temperature=0.0), 0, (), (), start + length, ())
    return Span(-1 - slot, slot, start, length, tuple(pages), (0,) * (length - draft), draft, True, begin)


async def measure(executor: Executor, limits: Limits, max_model_len: int) -> list[Point]:
    """(load, median seconds) of each load that there is time for."""
    points: list[Point] = []
    began, step = executor.now(), 0
    for load, spans in _plans(limits, max_model_len):
        seconds = []
        for _ in range(1 + RUNS):
            step -= 1
            result = await executor.submit(StepPlan(step, tuple(spans)))
            assert isinstance(result, StepResult)
            seconds.append(result.finished - result.started)
        points.append((load, median(seconds[1:])))
        if executor.now() - began > SECONDS and not limits.draft:
            break
    executor.release([span.slot for _, spans in _plans(limits, max_model_len) for span in spans])
    return points


def model(points: list[Point], limits: Limits, max_model_len: int) -> PerfModel:
    """A latency table from measured points, for one instance to keep up to date."""
    batches, lengths = grid(limits, max_model_len)
    chunks = [(load.prefill, seconds) for load, seconds in points if load.prefill]
    rate = max((tokens / seconds for tokens, seconds in chunks), default=1e4)
    table = TableModel(batches, lengths, prefill_rate=rate)
    table.add((load.decode, load.longest, seconds) for load, seconds in points if load.decode and not load.drafts)
    return Drafted(table, points) if limits.draft else table


def measured(executor: Executor, limits: Limits, max_model_len: int) -> list[Point]:
    """`measure` in an event loop of its own, before the engine has one."""
    return asyncio.run(measure(executor, limits, max_model_len))
