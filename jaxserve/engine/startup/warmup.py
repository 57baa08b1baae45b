"""Warm-up: makes the programs of an engine, the first ones before it serves and the others while it does.

No step ever waits for a program: those that are not ready are not used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.engine.memory.transfer import padded, piece_sizes
from jaxserve.engine.programs.draft_inputs import idle_drafts
from jaxserve.engine.programs.inputs import Int32, SlotTable
from jaxserve.engine.runtime.device_state import DeviceState
from jaxserve.engine.runtime.gc_control import uncollected
from jaxserve.engine.speculation.drafters import Call
from jaxserve.engine.startup.calls import Rung, idle_batch, idle_drafting, inner_calls, inside, rungs
from jaxserve.engine.startup.compiled import compile_counter
from jaxserve.engine.startup.executables import Executables, options_for
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin
from jaxserve.structured.token_filter import all_allowed

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]  # programs done, programs in total, label of the last one
NICE = 19  # of the compiler's threads while the engine serves
COMPILER = "llvm-w"  # how the names of the threads begin in which XLA compiles for a CPU
LOADING = 2  # threads that load programs while the engine serves, if all are kept; a compilation has its own
REST = 1.0  # times as long as a program took, its thread leaves the core to requests, if there are any
ENDING = 2.0  # seconds for the main thread to end, once pools refuse work
SWITCH = 5e-4  # seconds after which a thread that traces lets others run; Python's default is 5 ms


class ProgramCounts(NamedTuple):
    """Numbers of programs, of all instances."""

    total: int
    ready: int
    loaded: int  # kept executables of earlier starts
    later: int  # became ready while the engine serves


class Ladder:
    """The programs of equal instances, whose pools it allocates.

    Writer: `begin` before the engine serves, then the thread of `climb`.

    kept: executables of earlier starts; None: none are used, and none are kept. early, exchanges: see `rungs`.
    """

    def __init__(
        self,
        states: Sequence[DeviceState],
        kept: Executables | None = None,
        *,
        early: bool = False,
        exchanges: bool = False,
    ) -> None:
        self._states = states
        self.kept = kept
        self.done = self._at_first = 0  # programs that are ready, and that were when `begin` returned
        self._rungs = [rungs(state, early=early, alone=len(states) == 1, exchanges=exchanges) for state in states]
        self._platform = states[0].mesh.devices.flat[0].platform
        if early and self._platform != "cpu" and not self._all_kept():
            # Compiling for an accelerator tunes on it, in memory that the KV pool has by then.
            self._rungs = [rungs(state, early=False) for state in states]
        self._total = sum(len(rung.calls) for ladder in self._rungs for rung in ladder)
        self._total += sum(len(state.allocation) + inside(state) for state in states)
        self._lock = threading.Lock()  # guards `done` while several threads load
        self._climbing: threading.Thread | None = None
        self._busy: Callable[[], bool] = lambda: False
        self._stopped = threading.Event()

    def _all_kept(self) -> bool:
        kept = self.kept
        return kept is not None and all(
            kept.has(call) for ladder in self._rungs for rung in ladder[1:] for call in rung.calls
        )

    @property
    def counts(self) -> ProgramCounts:
        """How many programs there are now."""
        loaded = 0 if self.kept is None else self.kept.loaded
        return ProgramCounts(self._total, self.done, loaded, self.done - self._at_first)

    @property
    def first(self) -> Rung:
        """What `begin` makes, for the first instance."""
        return self._rungs[0][0]

    @property
    def rest(self) -> int:
        """The number of rungs that `climb` makes."""
        return len(self._rungs[0]) - 1

    def begin(self, progress: Progress | None = None, platform: str | None = None) -> float:
        """Make the programs of the first rung and run each once; return the seconds taken.

        The first instance's programs come first; the others load what those compiled, if the persistent
        cache is on. An instance runs its programs while the next one compiles, but not on GPUs: there the
        first collectives of one instance can block while libraries are loaded for another
        (openxla/xla#38932). platform: None: that of the first instance.
        """
        alone = (platform or self._platform) == "gpu"
        began, counter = time.perf_counter(), compile_counter()
        before, loads, traces = counter.compilations_total, counter.cache_loads_total, counter.traces_total
        threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="jaxserve-compile")
        first = self._total
        if self.rest:
            first = sum(len(state.allocation) for state in self._states) + sum(
                len(ladder[0].calls) for ladder in self._rungs
            )
        with uncollected(), threads as pool:

            def allocate(state: DeviceState) -> None:
                for call in state.allocation:
                    self._install(call, state)
                state.rebuild()

            def install(state: DeviceState, each: Sequence[Call]) -> None:
                compiling = {pool.submit(self._install, call, state): call for call in each}
                for finished in as_completed(compiling):
                    finished.result()
                    self.done += 1
                    if progress is not None:
                        progress(self.done, first, compiling[finished].label)

            runs = []
            for state, (rung, *_) in zip(self._states, self._rungs, strict=True):
                allocated = pool.submit(allocate, state)
                install(state, rung.calls)
                if rung.last:
                    install(state, inner_calls(state))
                allocated.result()
                self.done += len(state.allocation)
                state.complete = rung.last
                runs.append(pool.submit(run_through, state, rung))
                if alone:
                    runs[-1].result()
            for run in runs:
                run.result()
        seconds, self._at_first = time.perf_counter() - began, self.done
        log.info(
            "warm-up: %d of %d programs for %d instance(s) in %.1f s (%d kept ones loaded, %d compiled, "
            "%d from jax's cache; %d traced)",
            self.done,
            self._total,
            len(self._states),
            seconds,
            0 if self.kept is None else self.kept.loaded,
            counter.compilations_total - before,
            counter.cache_loads_total - loads,
            counter.traces_total - traces,
        )
        counter.warm()
        return seconds

    def climb(self, opened: Callable[[Rung], None], busy: Callable[[], bool] = lambda: False) -> None:
        """Make the other programs in a thread; `opened` is called there after each rung.

        busy: whether there are requests.
        """
        if self.rest:
            self._busy = busy
            self._climbing = threading.Thread(target=self._climb, args=(opened,), name="jaxserve-ladder")
            self._climbing.start()

    def _climb(self, opened: Callable[[Rung], None]) -> None:
        began, interval = time.perf_counter(), sys.getswitchinterval()
        several = LOADING if self._all_kept() else 1
        sys.setswitchinterval(SWITCH)
        try:
            _give_way()
            with ThreadPoolExecutor(several, "jaxserve-ladder") as pool:
                for at in range(1, 1 + self.rest):
                    pairs = list(zip(self._states, self._rungs, strict=True))
                    list(pool.map(self._later, [(call, state) for state, ladder in pairs for call in ladder[at].calls]))
                    if (rung := self._rungs[0][at]).last:
                        list(
                            pool.map(self._later, [(call, state) for state, _ in pairs for call in inner_calls(state)])
                        )
                    if self._stopped.is_set():
                        return
                    opened(rung)
        except Exception as error:
            if (
                isinstance(error, RuntimeError) and _exiting()
            ):  # of an `LLM` that was not closed; the pool takes no more
                return
            log.exception("%d of %d programs are ready; the others cannot be made: serving goes on without them",
                          self.done, self._total)  # fmt: skip
            return
        finally:
            sys.setswitchinterval(interval)
        log.info("all %d programs are ready, %.1f s after the first ones", self._total, time.perf_counter() - began)

    def _later(self, pair: tuple[Call, DeviceState]) -> None:
        """Install a program that no step waits for."""
        if self._stopped.is_set():
            return
        began = time.perf_counter()
        with compile_counter().later():
            self._install(*pair)
        with self._lock:
            self.done += 1
        if self._busy():
            self._stopped.wait(REST * (time.perf_counter() - began))

    def close(self, seconds: float | None = None) -> None:
        """Stop making programs, and wait for at most `seconds` until the current one is done."""
        self._stopped.set()
        if self._climbing is not None:
            self._climbing.join(seconds)

    def _install(self, call: Call, state: DeviceState) -> None:
        """Load the executable of a call, or compile it and keep it for the next start."""
        kept = self.kept
        executable = None if kept is None else kept.load(call, state.mesh.devices.flat)
        if executable is None:
            options = options_for(self._platform)
            executable = (
                call.program.lower(*call.args).compile(options) if kept is None else kept.compile(call, options)
            )
        call.program.install(call.args, executable)


def _exiting() -> bool:
    """Return whether the process is ending. Its pools refuse work a moment before the main thread has ended."""
    main = threading.main_thread()
    main.join(ENDING)
    return not main.is_alive()


def _give_way() -> None:
    """Let the compiler's threads run after others. On Linux, a priority is that of a thread.

    Not the threads that trace: with a low priority, they would keep the engine waiting for the interpreter's lock.
    """
    if sys.platform != "linux":
        return
    threads = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().startswith(COMPILER):
                threads.append(int(task.name))
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, NICE)


def run_through(state: DeviceState, rung: Rung) -> None:
    """Run every program of the first rung once, so that first-run setup of jax and the device is done."""
    limits, slots = state.programs.limits, SlotTable(state.programs.limits)
    drawn, widths = None, set()
    for bucket in rung.buckets:
        drawn, hidden = state.step(idle_batch(bucket, slots, full=False))
        if bucket.prompts:
            state.score(hidden, 0, np.zeros(1, np.int32))
            state.pool(hidden, [(0, 1)])
        if bucket.width not in widths:
            widths.add(bucket.width)
            for full in (False, True):
                for masks in (None, all_allowed(bucket.width, limits.vocab)):
                    state.draw(idle_batch(bucket, slots, full=full), (), drawn.rows, hidden, masks)
        walk = state.walk(idle_batch(bucket, slots, full=False))
        if walk is not None:
            while walk.left:
                state.segment(walk)
            state.end(walk)
    _run_drafts(state, slots)
    state.remember(0, Begin(SamplingParams(), 0, (), (), 0, ()))
    for size in piece_sizes(limits.row_pages) if rung.last else ():
        pages: Int32 = padded((), size, limits.pages)
        piece = state.export(pages)
        alone = piece[0].is_fully_addressable  # else no process has all of a piece, and none travels
        state.fill(pages, state.receive(piece) if alone else state.kv_buffer(size))
    if state.drafter is None:
        state.reset()  # the pools are as they were: padding writes nothing
    else:
        state.rebuild()
    jax.block_until_ready((state.pools, state.carry))
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
