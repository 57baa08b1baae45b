"""The engine with an 8B model of random weights: steps against their floors, host time, preemption, a shared device."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from benchmarks.engine_bench import stops
from benchmarks.engine_bench.folders import without_weights
from benchmarks.engine_bench.steps import (
    Spans,
    decodes_of,
    default_page,
    ends,
    positions,
    queued,
    repeated,
    spans_of,
    submitted,
)
from jaxserve.engine.programs.inputs import Bucket, InputBuilder, SlotTable
from jaxserve.engine.programs.mesh import plan_mesh, sub_meshes
from jaxserve.engine.runtime.device_state import DeviceState
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.results import read
from jaxserve.engine.startup.build import ExecutorConfig, build_executors, random_init
from jaxserve.engine.startup.calls import idle_batch
from jaxserve.models import registry
from jaxserve.models.published import published_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.perf.profile import Row

from . import floors
from .part import Run, Skip, in_a_line, slug
from .timing import MOSAIC

MODEL = "llama3-8b"
MEMORY = "0.92"  # share of the device's memory for jax: the default leaves a quarter to others
SIZES: dict[str, Any] = {"rows": 256, "tokens": 8192, "length": 16384, "pool": 40 << 30}  # pool: of both instances
DRY: dict[str, Any] = {"rows": 4, "tokens": 64, "length": 256, "pool": 64 << 20}
TINY = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
DECODES = ((64, 1024), (1, 1024), (256, 512), (64, 2048), (1, 4096))  # (rows, context), most important first; they fit
PROMPTS = (8192, 2048)
STEPS, RUNS, ARRIVALS, MOVES = 24, 5, 40, 5
THREADS = 8


def measure(run: Run) -> None:
    """Fill the tables `decode step`, `prefill`, `host`, `preemption` and `shared 2x1`, with weights made once."""
    _prepare()
    decodes, prompts = (((4, 16), (1, 16)), (64, 32)) if run.dry else (DECODES, PROMPTS)
    source, target = build_executors(_config(run, mesh="2x1", preempt_boundary="layer"))
    state = target.state
    rows = dict.fromkeys(count for count, _ in decodes)
    _compile_first(run, state, _buckets(target, rows, (*prompts, stops.SHORT)))
    # Sizes of the long prompt before the preempted chunk, of that chunk, and of moves.
    context, chunk, moved = (0, 64, 32) if run.dry else (8192, 2048, 4096)
    hosts = [one for one in decodes if one[1] == decodes[0][1] and one[0] in (64, 1, 4)]
    run.each(
        {f"decode {count} x {length}": partial(_decode, run, target, count, length) for count, length in decodes}
        | {f"prefill {tokens}": partial(_prefill, run, target, tokens) for tokens in prompts}
        | {f"host {count}": partial(_host, run, target, count, length) for count, length in hosts}
        | {
            "preemption": partial(_preempted, run, target, chunk, context),
            "shared 2x1": partial(_shared, run, source, target, moved, 4 if run.dry else 64, decodes[0][1]),
        }
    )


def update_mode(run: Run, flags: str, mlp: str = "auto") -> None:
    """Fill a row of `update mode`: one decode step with these XLA flags, which a process reads once.

    mlp: backend of gate, up and SwiGLU, which is compared in the same way.
    """
    if flags and not _known(flags):
        raise Skip(f"this jaxlib does not know {flags}")
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), flags)))
    _prepare()
    # A folder of its own: programs keep the flags that they were compiled with.
    folder = run.scratch / f"programs{slug(flags)}"
    (executor,) = build_executors(_config(run, mesh="1x1", cache_folder=folder, mlp_backend=mlp))
    rows, context = (4, 16) if run.dry else DECODES[0]
    _compile_first(run, executor.state, _buckets(executor, (rows,), ()))
    found = asyncio.run(host(executor, rows, context, 3 if run.dry else STEPS))
    run.row("update mode", flags=flags or "default", mlp=mlp, rows=rows, context=context, **found)


def _known(flags: str) -> bool:
    """Return whether XLA knows these flags and their values. It ends a process at others, so a child tries."""
    child = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=child, capture_output=True, check=False).returncode == 0


def _prepare() -> None:
    os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY)


def spec_of(run: Run) -> ModelSpec:
    """Return the model; in a dry run one of two layers."""
    if not run.dry:
        return published_spec(MODEL)
    return registry.load_spec(without_weights(run.scratch / "tiny", {**TINY, "num_key_value_heads": 1}))


def _config(run: Run, mesh: str, **more: Any) -> ExecutorConfig:
    """Return the configuration of executors that compile a program at its first use."""
    sizes, plan = DRY if run.dry else SIZES, plan_mesh(mesh)
    sub_meshes(plan, share_devices=True)  # before jax starts, so that devices can be emulated
    page = default_page()
    backend = {} if run.dry or MOSAIC in run.facts else {"attention_backend": "xla", "sampling_backend": "xla"}
    return ExecutorConfig(
        spec=positions(spec_of(run), sizes["length"] + page), load=random_init(), mesh=plan,
        max_num_seqs=sizes["rows"], max_num_batched_tokens=sizes["tokens"],
        max_model_len=-(-sizes["length"] // page) * page, page_size=page, kv_cache_memory=sizes["pool"],
        share_devices=True, warm=False,
        **{"cache_folder": Path(os.environ.get("JAXSERVE_CACHE_DIR") or run.scratch / "programs"), **backend, **more},
    )  # fmt: skip


def _buckets(executor: JaxExecutor, rows: Iterable[int], tokens: Iterable[int]) -> list[Bucket]:
    """Return the programs of decode steps of `rows` rows, and of prompt chunks of `tokens` tokens."""
    builder = InputBuilder(executor.state.programs.limits)
    steps = [(count, count) for count in rows] + [(1, count) for count in tokens]
    return list(dict.fromkeys(builder.bucket(*step) for step in steps))


def _compile_first(run: Run, state: DeviceState, wanted: Sequence[Bucket]) -> None:
    """Compile step programs and the sampling after them side by side; their first calls find them."""
    limits, slots = state.programs.limits, SlotTable(state.programs.limits)
    dtype = state.weights["embed"].dtype

    def step(bucket: Bucket) -> tuple[str, Any]:
        packed = idle_batch(bucket, slots, full=False).packed
        program = state.programs.step[bucket]
        return bucket.label, program.lower(state.weights, state.pools, state.carry.tokens, packed)

    def draw(width: int) -> tuple[str, Any]:
        hidden = state.replicated((width, state.programs.spec.dim), dtype)
        sampling = slots.columns[np.full(width, limits.slots)]
        return f"draw {width}", state.programs.draw.lower(state.weights, hidden, state.carry, sampling)

    def made(work: tuple[Any, Any]) -> None:
        began = time.perf_counter()
        try:
            label, lowered = work[0](work[1])
            traced = time.perf_counter()
            lowered.compile()
        except Exception as error:  # costs the items that need it, at their first call
            run.row("compile", part=run.part.name, program=str(work[1]), reason=in_a_line(error))
            return
        run.row(
            "compile", part=run.part.name, program=label, trace_s=round(traced - began, 2),
            compile_s=round(time.perf_counter() - traced, 2),
        )  # fmt: skip

    todo = [*((step, bucket) for bucket in wanted), *((draw, width) for width in {one.width for one in wanted})]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(made, todo):
            pass


def _decode(run: Run, executor: JaxExecutor, rows: int, context: int) -> None:
    pages = rows * -(-context // executor.page_size)
    if pages > executor.pages:
        raise Skip(f"needs {pages} pages, the pool has {executor.pages}")

    async def steps() -> list[float]:
        spans = decodes_of(executor, rows, context)
        await submitted(executor, spans)
        return await queued(executor, repeated(spans), 3 if run.dry else STEPS)

    seconds = asyncio.run(steps())
    spec, dtype = executor.state.programs.spec, executor.state.weights["embed"].dtype
    run.row(
        "decode step", rows=rows, context=context, step_ms=1e3 * median(seconds), best_ms=1e3 * min(seconds),
        tokens_s=rows / median(seconds),
        **floors.against_bytes(run.facts, median(seconds), floors.decode_bytes(spec, dtype, rows, context)),
    )  # fmt: skip


def _prefill(run: Run, executor: JaxExecutor, tokens: int) -> None:
    async def once() -> float:
        result: Any = await executor.submit(StepPlan(1, spans_of(executor, (Row(0, tokens),), 0)))
        return float(result.finished - result.started)

    times = [asyncio.run(once()) for _ in range(1 + (2 if run.dry else RUNS))][1:]
    operations = floors.chunk_flops(executor.state.programs.spec, [Row(0, tokens)])
    run.row(
        "prefill", tokens=tokens, padded=_buckets(executor, (), [tokens])[0].tokens, time_ms=1e3 * median(times),
        best_ms=1e3 * min(times), tokens_s=tokens / median(times),
        **floors.against_flops(run.facts, median(times), operations),
    )  # fmt: skip


def _host(run: Run, executor: JaxExecutor, rows: int, context: int) -> None:
    found = asyncio.run(host(executor, rows, context, 3 if run.dry else STEPS))
    run.row("host", rows=rows, context=context, **found)


async def host(executor: JaxExecutor, rows: int, context: int, count: int) -> dict[str, float]:
    """Return a decode step's time with others queued and without, and its host time in parts, in ms.

    exposed_ms: what each step takes longer if it is submitted only after the last one's result.
    """
    spans = decodes_of(executor, rows, context)
    await submitted(executor, spans)
    more = repeated(spans)
    step = median(await queued(executor, more, count))
    times = []
    for _ in range(count):
        began = executor.now()
        flying = executor.submit(StepPlan(1, more))
        sent = executor.now()
        await flying
        times.append((sent - began, executor.now() - began))
    submits, alone = (median(part) for part in zip(*times, strict=True))
    found = {"step_ms": step, "awaited_ms": alone, "exposed_ms": alone - step, "submit_ms": submits}
    return {name: 1e3 * seconds for name, seconds in (found | _parts(executor, spans, count)).items()}


def _parts(executor: JaxExecutor, spans: Spans, count: int) -> dict[str, float]:
    """Return the median seconds of building a step's inputs, dispatching its two programs, and reading its result."""
    state = executor.state
    limits = state.programs.limits
    slots, builder, more = SlotTable(limits), InputBuilder(limits), repeated(spans)
    for span in spans:
        assert span.begin is not None
        slots.begin(span.slot, span.begin)
        slots.extend(span.slot, span.new_pages)
    times: list[tuple[float, ...]] = []
    for _ in range(count):
        begun = time.perf_counter()
        batch = builder.build(more, slots)
        made = time.perf_counter()
        program = state.programs.step[batch.bucket]
        rows, state.pools, hidden = program(state.weights, state.pools, state.carry.tokens, batch.packed)
        dispatched = time.perf_counter()
        drawn = state.draw(batch, more, rows, hidden)
        sent = time.perf_counter()
        drawn.wait()
        ended = time.perf_counter()
        read(StepPlan(1, more), batch, drawn, sent, ended)
        times.append((made - begun, dispatched - made, sent - dispatched, time.perf_counter() - ended))
    names = "build_ms", "dispatch_ms", "draw_ms", "read_ms"
    return {name: median(found) for name, found in zip(names, zip(*times, strict=True), strict=True)}


def _preempted(run: Run, executor: JaxExecutor, chunk: int, context: int) -> None:
    """Fill `preemption`: when a running prompt step stops for a short prompt, and what its segments cost."""
    runs, arrivals = (2, 4) if run.dry else (RUNS, ARRIVALS)
    found = asyncio.run(stops.measured(executor, chunk, None, context=context, runs=runs, arrivals=arrivals))
    run.row("preemption", boundary="layer", chunk=chunk, context=context, **found)


def _shared(run: Run, source: JaxExecutor, target: JaxExecutor, tokens: int, rows: int, context: int) -> None:
    """Fill `shared 2x1`: ms of a move of KV alone, and the receiver's step times without and beside moves."""
    pages = -(-tokens // target.page_size)
    size = pages * target.state.programs.spec.cache.page_bytes(target.page_size, target.state.pools[0][0].dtype)
    found = asyncio.run(_moved(source, target, pages, rows, context, 2 if run.dry else MOVES))
    run.row("shared 2x1", tokens=tokens, mb=size / 1e6, gb_s=size / 1e6 / found["move_ms"], rows=rows, **found)


async def _moved(
    source: JaxExecutor, target: JaxExecutor, pages: int, rows: int, context: int, times: int
) -> dict[str, Any]:
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
