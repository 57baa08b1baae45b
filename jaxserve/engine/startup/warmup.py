"""Warm-up: compiles every program before the first request, and counts later compilations.

There should be none.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

import jax
import numpy as np

from jaxserve.engine.memory.transfer import padded, piece_sizes
from jaxserve.engine.programs import compat
from jaxserve.engine.programs.draft_inputs import idle_drafts
from jaxserve.engine.programs.inputs import Batch, Bucket, Float32, Int32, Layout, SlotTable
from jaxserve.engine.programs.pooling import POOLED
from jaxserve.engine.programs.segments import pools_of
from jaxserve.engine.programs.step import SCORED, extras
from jaxserve.engine.runtime.device_state import DeviceState
from jaxserve.engine.runtime.gc_control import uncollected
from jaxserve.engine.speculation.drafters import Call
from jaxserve.engine.startup.executables import Executables
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin
from jaxserve.structured.token_filter import Words, words

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]  # programs done, programs in total, label of the last one
COMPILE, LOAD = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counts the programs that jax compiles, and those that it loads from the persistent cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = self._loaded = self._warm = 0
        self.writable = True  # whether the persistent cache stores programs; set by `use_persistent_cache`
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE:  # jax reports it for loaded programs too
            with self._lock:
                self._made += 1

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == LOAD:
            with self._lock:
                self._loaded += 1

    @property
    def compilations_total(self) -> int:
        return self._made - self._loaded

    @property
    def cache_loads_total(self) -> int:
        return self._loaded

    @property
    def unkept_total(self) -> int:
        """Compiled programs that the next start compiles again, because the cache folder is not writable."""
        return 0 if self.writable else self.compilations_total

    @property
    def after_warmup(self) -> int:
        """Programs compiled or loaded since `warm`; each delayed a step."""
        return self._made - self._warm

    def warm(self) -> None:
        """Mark the end of warm-up."""
        self._warm = self._made


@cache
def compile_counter() -> CompileCounter:
    """Return the counter of this process: a single one, because jax never removes a listener."""
    return CompileCounter()


def cache_folder() -> Path:
    """Return the folder of compiled programs.

    JAXSERVE_CACHE_DIR, else jax's configured cache folder, else ~/.cache/jaxserve/xla.
    """
    named = os.environ.get("JAXSERVE_CACHE_DIR") or jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return Path(named or Path.home() / ".cache" / "jaxserve" / "xla")


def why_not_writable(folder: Path) -> str | None:
    """Return why a folder cannot be written, or None; a missing folder is created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"


def use_persistent_cache(folder: Path | None = None) -> Path:
    """Keep compiled programs between runs and share them among instances.

    folder: None: see `cache_folder`.
    """
    path = folder or cache_folder()
    counter, reason = compile_counter(), why_not_writable(path)
    if reason is not None and counter.writable:
        log.warning("compiled programs and profiles are not stored: %s; set JAXSERVE_CACHE_DIR", reason)
        warnings.filterwarnings("ignore", message="Error writing persistent compilation cache entry")  # one per program
    counter.writable = reason is None
    jax.config.update("jax_compilation_cache_dir", str(path))  # also if it can only be read
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compat.share_programs()
    return path


def idle_batch(bucket: Bucket, slots: SlotTable, *, full: bool) -> Batch:
    """Return a step of padding, which writes and samples nothing."""
    packed = np.zeros(Layout.of(bucket, slots.limits).end, np.int32)
    sampling = slots.columns[np.full(bucket.width, slots.limits.slots)]
    return Batch(bucket, packed, sampling, full, None, (), arguments=idle_arguments(bucket.width, slots))


def idle_arguments(width: int, slots: SlotTable) -> Float32 | None:
    """Return `Batch.arguments` of padding."""
    return slots.arguments[np.full(width, slots.limits.slots)] if slots.limits.processors else None


def idle_drafting(bucket: Bucket, depth: int, row_pages: int, slots: SlotTable) -> Batch:
    """Return a step of padding that drafts."""
    batch = idle_batch(bucket, slots, full=False)
    assert batch.sampling is not None
    size = next(
        one.rows for one in slots.limits.buckets if one.decode and one.rows >= min(bucket.rows, slots.limits.slots)
    )
    return batch._replace(drafts=idle_drafts(depth, size, row_pages, batch.sampling, slots.limits.slots))


def all_allowed(rows: int, vocab: int) -> Words:
    """Return masks that allow every token."""
    return np.full((rows, words(vocab)), -1, np.int32)


def drafting_calls(state: DeviceState) -> list[Call]:
    """Return the programs of steps that draft."""
    programs, limits, made = state.programs, state.programs.limits, []
    if state.drafter is None:
        return []
    slots, dtype, seen = SlotTable(limits), state.weights["embed"].dtype, set()
    for bucket in limits.buckets:
        for depth in () if bucket.decode else limits.depths:
            drafts = idle_drafting(bucket, depth, limits.row_pages, slots).drafts
            assert drafts is not None
            hidden = state.replicated((bucket.tokens, programs.spec.dim), dtype)
            if (shape := (bucket.tokens, len(drafts.places))) in seen:
                continue
            seen.add(shape)
            made.append(Call(f"pick {len(drafts.places)} of {bucket.tokens}", programs.pick, (hidden, drafts.places)))
    for width in limits.widths:
        for depth in limits.depths:
            rows = state.replicated((width * (1 + depth), programs.spec.dim), dtype)
            sampling, lengths = slots.columns[np.full(width, limits.slots)], np.zeros(width, np.int32)
            given = state.weights, rows, state.carry, sampling, lengths
            masks, arguments = all_allowed(width * (1 + depth), limits.vocab), idle_arguments(width, slots)
            plain, masked = (*given, *extras(None, arguments)), (*given, *extras(masks, arguments))
            made.append(Call(f"verify {width} x {depth}", programs.verify, plain))
            made.append(Call(f"verify masked {width} x {depth}", programs.masked_verify, masked))
        slots_of = np.zeros(width, np.int32)
        made.append(Call(f"drafted {width}", programs.drafted, (state.carry.tokens, slots_of)))
        forced = np.full((width, limits.draft), -1, np.int32)
        made.append(Call(f"foresee {width}", programs.foresee, (state.carry.tokens, slots_of, forced)))
    row = np.zeros(limits.positions, np.int32)
    made.append(Call("recall", programs.recall, (state.carry, np.int32(0), row)))
    return [*made, *state.drafter.calls(state.carry)]


def calls(state: DeviceState) -> list[Call]:
    """Return the programs of an instance, the slowest to compile first, without `inner_calls`."""
    programs, limits = state.programs, state.programs.limits
    spec, slots, made = programs.spec, SlotTable(limits), []
    for bucket in reversed(limits.buckets):
        packed = idle_batch(bucket, slots, full=False).packed
        made.append(Call(bucket.label, programs.step[bucket], (state.weights, state.pools, state.carry.tokens, packed)))
    segments = state.segments
    for bucket, begin in () if segments is None else reversed(segments.begin.items()):
        packed = idle_batch(bucket, slots, full=False).packed
        made.append(Call(f"begin {bucket.tokens}", begin, (state.outer, state.carry.tokens, packed)))
    dtype = state.weights["embed"].dtype
    for width in limits.widths:
        rows, sampling = state.replicated((width, spec.dim), dtype), slots.columns[np.full(width, limits.slots)]
        ids, values = state.unadjusted(width)
        plain = state.weights, rows, state.carry, sampling
        full = state.weights, rows, state.carry, state.counts, sampling, ids, values, np.int32(0)
        arguments = idle_arguments(width, slots)
        free, masked = extras(None, arguments), extras(all_allowed(width, limits.vocab), arguments)
        made.append(Call(f"draw {width}", programs.draw, (*plain, *free)))
        made.append(Call(f"draw masked {width}", programs.masked, (*plain, *masked)))
        made.append(Call(f"draw fully {width}", programs.full, (*full, *free)))
        made.append(Call(f"draw fully masked {width}", programs.masked_full, (*full, *masked)))
    block, targets = state.replicated((SCORED, spec.dim), dtype), np.zeros(SCORED, np.int32)
    made.append(Call("score", programs.score, (state.weights, block, targets)))
    for tokens, program in programs.block.items():
        made.append(Call(f"block {tokens}", program, (state.replicated((tokens, spec.dim), dtype), np.int32(0))))
    none = np.zeros(POOLED, np.int32)
    for tokens, program in programs.pool.items():
        made.append(Call(f"pool {tokens}", program, (state.replicated((tokens, spec.dim), dtype), none, none)))
    row = np.zeros(limits.vocab, np.int16)
    made.append(Call("remember", programs.remember, (state.counts, np.int32(0), row)))
    for size in piece_sizes(limits.row_pages):
        pages = padded((), size, limits.pages)
        made.append(Call(f"export {size}", programs.moves.gather, (state.pools, pages)))
        made.append(Call(f"import {size}", programs.moves.scatter, (state.pools, pages, state.kv_buffer(size)[0])))
    return [*made, *drafting_calls(state)]


def inner_calls(state: DeviceState) -> list[Call]:
    """Return the programs inside preemptible steps, whose abstract arguments are what the installed `calls` return."""
    segments, slots, made = state.segments, SlotTable(state.programs.limits), list[Call]()
    for bucket in reversed(segments.buckets) if segments is not None else ():
        assert segments is not None
        args = state.outer, state.carry.tokens, idle_batch(bucket, slots, full=False).packed
        stream, last = state.described(segments.begin[bucket].results(*args))
        for kind, link in {link.kind: link for link in segments.links}.items():
            pools = pools_of(link, state.pools)
            held = state.weights["layers"][link.layers], pools, stream
            made.append(Call(f"{kind[1].value} {bucket.tokens}", segments.through[kind], held))
        made.append(Call(f"end {bucket.tokens}", segments.end[bucket], (state.outer, stream.x, last)))
    return made


def inside(state: DeviceState) -> int:
    """Return the number of `inner_calls`."""
    made = state.segments
    return 0 if made is None else len(made.buckets) * (1 + len({link.kind for link in made.links}))


def run_through(state: DeviceState) -> None:
    """Run every program once, so that first-run setup of jax and the device is done."""
    limits, slots = state.programs.limits, SlotTable(state.programs.limits)
    drawn, widths = None, set()
    for bucket in limits.buckets:
        drawn, hidden = state.step(idle_batch(bucket, slots, full=False))
        state.score(hidden, 0, np.zeros(1, np.int32))
        state.pool(hidden, [(0, 1)])
        if bucket.width not in widths:
            widths.add(bucket.width)
            state.draw(idle_batch(bucket, slots, full=True), (), drawn.rows, hidden)
            masks = all_allowed(bucket.width, limits.vocab)
            for full in (False, True):
                state.draw(idle_batch(bucket, slots, full=full), (), drawn.rows, hidden, masks)
        walk = state.walk(idle_batch(bucket, slots, full=False))
        if walk is not None:
            while walk.left:
                state.segment(walk)
            state.end(walk)
    _run_drafts(state, slots)
    state.remember(0, Begin(SamplingParams(), 0, (), (), 0, ()))
    for size in piece_sizes(limits.row_pages):
        pages: Int32 = padded((), size, limits.pages)
        piece = state.export(pages)
        alone = piece[0].is_fully_addressable  # else no process has all of a piece, and none travels
        state.fill(pages, state.receive(piece) if alone else state.kv_buffer(size))
    state.rebuild()
    jax.block_until_ready(state.pools)  # created last, so everything before has ended on the devices
    if drawn is not None:
        drawn.wait()  # raises what a device raised


def _run_drafts(state: DeviceState, slots: SlotTable) -> None:
    limits = state.programs.limits
    state.begin(0, Begin(SamplingParams(), 0, (), (), 0, ()), 0)
    if state.drafter is not None:
        state.drafter.run(state.carry)
    for bucket in limits.buckets:
        for depth in () if bucket.decode else limits.depths:
            batch = idle_drafting(bucket, depth, limits.row_pages, slots)
            state.step(batch)
            masks = all_allowed(bucket.width * (1 + depth), limits.vocab)
            forced = np.full((bucket.width, limits.draft), -1, np.int32)
            state.choose(batch, (), state.compute(batch, forced), None, masks)
        if bucket.decode and state.drafter is not None:
            sampling = slots.columns[-1:]
            drafts = idle_drafts(limits.draft, bucket.rows, limits.row_pages, sampling, limits.slots)
            state.carry = state.drafter.draft(state.carry, drafts)


def warm_up(
    states: Sequence[DeviceState],
    progress: Progress | None = None,
    platform: str | None = None,
    kept: Executables | None = None,
) -> float:
    """Load or compile all programs of equal instances, and return the seconds taken.

    The first instance's programs come first; the others load what those compiled, if the persistent
    cache is on. An instance runs its programs while the next one compiles, but not on GPUs: there the
    first collectives of one instance can block while libraries are loaded for another
    (openxla/xla#38932). kept: executables of earlier starts; None: none are used.
    platform: None: that of the first instance.
    """
    alone = (platform or states[0].mesh.devices.flat[0].platform) == "gpu"
    began, counter = time.perf_counter(), compile_counter()
    before, loads = counter.compilations_total, counter.cache_loads_total
    done = total = 0
    threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="jaxserve-compile")
    with uncollected(), threads as pool:

        def install(state: DeviceState, each: Sequence[Call]) -> None:
            nonlocal done
            compiling = {pool.submit(_install, call, state, kept): call for call in each}
            for finished in as_completed(compiling):
                finished.result()
                done += 1
                if progress is not None:
                    progress(done, total, compiling[finished].label)

        todo, runs = [calls(state) for state in states], []
        total = sum(map(len, todo)) + len(states) * inside(states[0])
        for state, each in zip(states, todo, strict=True):
            install(state, each)
            install(state, inner_calls(state))
            runs.append(pool.submit(run_through, state))
            if alone:
                runs[-1].result()
        for run in runs:
            run.result()
    seconds = time.perf_counter() - began
    log.info(
        "warm-up: %d programs for %d instance(s) in %.1f s (%d kept ones loaded, %d compiled, %d from jax's cache)",
        total,
        len(states),
        seconds,
        0 if kept is None else kept.loaded,
        counter.compilations_total - before,
        counter.cache_loads_total - loads,
    )
    counter.warm()
    return seconds


def _install(call: Call, state: DeviceState, kept: Executables | None) -> None:
    """Load the executable of a call, or compile it and keep it for the next start."""
    made = None if kept is None else kept.load(call, state.mesh.devices.flat)
    if made is None:
        made = call.program.lower(*call.args).compile() if kept is None else kept.compile(call)
    call.program.install(call.args, made)
