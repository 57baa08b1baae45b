"""Two instances that share a device: moving KV from one to the other, and what it does to the other's decodes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from statistics import median
from typing import Any

import jax

from benchmarks.engine_bench.steps import decodes_of, ends, repeated, submitted
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup.build import build_executors

from . import engine
from .environment import prepare
from .part import Run

SIZES = {"rows": 64, "tokens": 2048, "length": 16384, "pool": 24 << 30}
DRY = {"rows": 4, "tokens": 64, "length": 256}
TOKENS = (4096, 1024, 16384)
ROWS, CONTEXT = 64, 512  # decodes of the instance that receives
TIMES = 5


def measure(run: Run) -> None:
    """Fill the table `shared 2x1`: seconds of a move alone, and the receiver's step times without and beside moves."""
    prepare(run)
    sizes, tokens, rows, context = (DRY, (32, 128), 4, 16) if run.dry else (SIZES, TOKENS, ROWS, CONTEXT)
    source, target = build_executors(engine.config_of(run, mesh="2x1", share_devices=True, **sizes))
    engine.compile_first(run, target.state, engine.buckets(target, (rows,)))
    size = target.state.programs.spec.cache.page_bytes(target.page_size, target.state.pools[0][0].dtype)
    for count in tokens:
        pages = -(-count // target.page_size)
        found = asyncio.run(_moved(source, target, pages, rows, context, 2 if run.dry else TIMES))
        move = found["move_ms"]
        run.row(
            "shared 2x1", tokens=count, mb=pages * size / 1e6, gb_s=pages * size / 1e6 / move, rows=rows, **found
        )  # fmt: skip


async def _moved(
    source: JaxExecutor, target: JaxExecutor, pages: int, rows: int, context: int, times: int
) -> dict[str, Any]:
    """Return milliseconds: of a move alone and beside decodes, and of decode steps without and beside moves."""
    spans = decodes_of(target, rows, context)
    await submitted(target, spans)
    await _moves(source, target, pages, 1)
    alone = await _moves(source, target, pages, times)
    more = repeated(spans)
    quiet = await ends(target, more, lambda done: done < 4 * times)
    moving = asyncio.ensure_future(_moves(source, target, pages, times))
    beside = await ends(target, more, lambda done: done < 2 or not moving.done())
    await moving
    steps, disturbed = ([after - before for before, after in pairwise(some)] for some in (quiet, beside))
    found = {
        "move_ms": median(alone),
        "move_beside_ms": median(moving.result()),
        "step_ms": median(steps),
        "step_beside_ms": median(disturbed),
        "added_ms": max(disturbed) - median(steps),
    }
    return {name: 1e3 * seconds for name, seconds in found.items()}


async def _moves(source: JaxExecutor, target: JaxExecutor, pages: int, times: int) -> list[float]:
    """Move the source's first pages to the target's last ones, and return the seconds of each move."""
    seconds = []
    for _ in range(times):
        began = source.now()
        buffer = source.export_kv(range(pages))
        await target.import_kv(buffer, range(target.pages - pages, target.pages))
        # A page read back waits for the scatter; the pool itself may have been donated to the next step.
        arrived = target.export_kv([target.pages - 1])
        await asyncio.to_thread(jax.block_until_ready, [piece for _, piece in arrived.pieces])
        seconds.append(source.now() - began)
    return seconds
