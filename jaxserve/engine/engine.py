"""The engine: one thread with its own event loop, which owns the cluster and dispatches every step.

Callers on other threads submit requests and receive tokens through callbacks; they tokenize and
detokenize on their own threads. If a request fails, only that request ends with an error. If the
engine itself fails, every request ends with an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.activity import Activity, activity
from jaxserve.engine.runtime.checks import cause, check_request
from jaxserve.engine.runtime.classes import Tallies
from jaxserve.engine.runtime.flight_recorder import FlightRecorder, Recent, RequestLife
from jaxserve.engine.runtime.gc_control import GCControl, Stalls, watched_loop
from jaxserve.engine.runtime.headroom import Headroom, headroom
from jaxserve.engine.runtime.heartbeat import Heartbeat
from jaxserve.engine.runtime.info import EngineInfo, InstanceStats, Stats
from jaxserve.engine.runtime.intake import Intake
from jaxserve.engine.runtime.kv_events import PERIOD, KVEventFeed
from jaxserve.engine.runtime.kv_pages import KVPages
from jaxserve.engine.runtime.profiler import Profiler
from jaxserve.engine.runtime.queue import ROWS, Queue
from jaxserve.engine.startup.assemble import CLOSING, Machine, assemble
from jaxserve.engine.startup.calls import Rung
from jaxserve.engine.startup.warmup import Progress as OnProgress
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.errors import InvalidValue, JaxserveError, Unavailable
from jaxserve.sched.api.kv_source import KVSource
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import UNAVAILABLE, Delta
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.pooling import LAST
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.instance.slack import least_slack
from jaxserve.sched.instance.stats import Counters
from jaxserve.sched.journal import REHEARSAL
from jaxserve.settings.seeds import request_seed
from jaxserve.structured.compiler import Compiler

log = logging.getLogger(__name__)

T = TypeVar("T")

REHEARSED = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
REMEMBERED = 4096  # finished requests with times that `record` has not returned yet
POLL = 0.2  # seconds between two checks that the engine's thread is alive
SLACK = 2.0  # seconds beyond CLOSING for the work that does not involve devices
COPYING = 1.0  # seconds of it for pages of the last requests to be copied to the KV tiers
SILENT = 30.0  # seconds without a heartbeat after which the engine's thread counts as hung


class Engine:
    """An engine that serves, created by `start`.

    `submit`, `cancel`, `record` and `stats` may be called from any thread.
    """

    def __init__(self, config: ServeConfig, machine: Machine) -> None:
        self.info: EngineInfo = machine.info
        self._machine = machine
        self.recorder = FlightRecorder(machine.now) if config.dashboard else None  # read on the engine's thread
        self._cluster = machine.cluster(self._finished, self.recorder)
        self._queue = Queue(None, machine.now)  # unbounded until warm-up requests are done
        self._seed = request_seed(config.seed)
        self._ids = itertools.count()
        self._entering = 0  # submitted, not yet routed; guarded by _lock
        self._lock = threading.RLock()  # a listener that is told while a request is routed may submit another
        self._draining = False
        self._ended = False  # no new requests are accepted; guarded by _lock, like _error
        self._error: str | None = None
        self._left = False  # something on a device hung while the engine was closed
        self._over: OrderedDict[int, RequestMetrics] = OrderedDict()
        self._handed_over = set[int]()  # unfinished requests that another engine continues
        self._listeners: dict[int, Callable[[Delta], None]] = {}  # entries are added under _lock
        self._reasons: Counter[str] = Counter()
        self._classes = config.classes
        self._tallies = Tallies(self._classes.names)
        self._headroom = (Headroom(),) * len(self._cluster.cores)
        self._activity = (Activity(),) * len(self._cluster.cores)
        self._stalls = Stalls()
        self._gc_control = GCControl(self._slack)
        self._loop = watched_loop(self._stalls)
        self._intake = Intake(self._loop)
        events = config.kv_events
        self._events = KVEventFeed(events, self.schedulers) if events is not None and events.published else None
        self._profiler = Profiler(config.profile_dir)
        self._heartbeat = Heartbeat(self._loop, machine.now)
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="jaxserve-engine", daemon=True)

    @classmethod
    def start(cls, config: ServeConfig, *, progress: OnProgress | None = None) -> Engine:
        """Load the model, make its first programs and start to serve; the others are made meanwhile.

        Blocks until ready. With `warmup="full"`, all programs are made first. Raises JaxserveError.
        """
        return cls.on(assemble(config, progress, early=config.warmup == "early"))

    @classmethod
    def on(cls, machine: Machine) -> Engine:
        """Start to serve on an assembled, warm machine.

        Blocks until ready. Raises JaxserveError.
        """
        engine = cls(machine.config, machine)
        engine._thread.start()
        engine._rehearse()
        engine._gc_control.begin()
        engine._loop.call_soon_threadsafe(engine._stalls.clear)  # stalls during warm-up do not count
        bound = machine.config.max_num_queued_reqs or ROWS * machine.limits.rows
        engine._queue = Queue(bound, machine.now)
        engine._cluster.queue_timeout.seconds = machine.config.queue_timeout
        if machine.ladder is not None:
            machine.ladder.climb(engine._opened, lambda: bool(engine._listeners))
        return engine

    def _opened(self, rung: Rung) -> None:
        """Use more programs. In the ladder's thread; waits for nothing."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._machine.open, rung, self._cluster)

    def _rehearse(self) -> None:
        """Serve a few short requests before the first real one.

        This pays one-time costs, for example the first transfer between two meshes and first calls on
        the path from prompt to tokens, before a client can notice them.
        """
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()

        def heard(delta: Delta) -> None:
            if delta.finish_reason is not None:
                ended.put(delta.error or "")

        count = 2 * len(self._cluster.cores)
        params = REHEARSED if self.info.generates else replace(REHEARSED, max_tokens=1, pooling=LAST)
        for _ in range(count):
            self.submit(NewRequest((0,) * 3, params, NO_SLO, key=REHEARSAL), heard)
        errors = [ended.get() for _ in range(count)]
        if any(errors):
            self.close()
            raise JaxserveError(f"the engine failed at its first request: {max(errors)}")
        for core in self._cluster.cores:
            core.scheduler.counters = Counters()
        for seen in (self._over, self._reasons):
            seen.clear()
        if self.recorder is not None:
            self.recorder.clear()
        self._tallies = Tallies(self._classes.names)
        self._cluster.clear_totals()

    # requests, from any thread

    def submit(self, new: NewRequest, on_delta: Callable[[Delta], None]) -> int:
        """Submit a request and return its id at once. `on_delta` is called in the engine's thread.

        Structured outputs that are new are compiled first, in another thread. Raises InvalidValue if the request
        cannot be served, QueueFull if too many requests wait,
        Unavailable if no instance responds, and JaxserveError if the engine is shutting down.
        """
        prompt, params, longest = new.prompt, new.params, self.info.max_model_len
        check_request(self.info, prompt, params)
        if params.structured_outputs is not None:
            self.compiler.check(params.structured_outputs)
        id, now = next(self._ids), self._machine.now()
        request = Request(
            id,
            new,
            now - new.waited,
            seed=self._seed_of(params, id),
            eos=self.info.eos,
            thinking=self.info.thinking.after(prompt) if new.slo.stages else None,
            limit=1 if new.handed_over else min(params.max_tokens or longest, longest - len(prompt)),
            class_=self._classes.of(new.tier, new.slo),
        )
        if new.progress is not None:
            request.resume(new.progress, now)
        with self._lock:
            self._admit()
            self._entering += 1
            if new.handed_over:
                self._handed_over.add(id)
            self._listeners[id] = on_delta  # from now on every end of the engine calls it
            self._intake(self._enter, request)
        return id

    def check_outputs(self, prompts: int, n: int) -> None:
        """Raise InvalidValue if the queue can never hold `n` outputs of each of `prompts` prompts."""
        self._queue.check_outputs(prompts, n, sum(role is not Role.DECODE for role in self.roles))

    @property
    def queue_bound(self) -> int | None:
        """The number of requests that may wait for each instance that takes prompts; None: unbounded."""
        return self._queue.bound

    def cancel(self, request: int, reason: str = "abort") -> None:
        """End a request early; no effect if it has ended."""
        with suppress(RuntimeError):  # the loop is closed: every request has ended
            self._intake(self._cluster.cancel, request, reason)  # after it has entered

    def record(self, request: int) -> RequestMetrics | None:
        """Return the times of a finished request, once.

        None if the request is unknown, was returned before, or ended too long ago.
        """
        return self._over.pop(request, None)

    def refusal(self, request: int) -> JaxserveError | None:
        """Return None: `submit` raises at once what an engine in another process answers later."""
        return None

    def _seed_of(self, params: SamplingParams, id: int) -> int:
        """Return the request's seed, or derive one from the engine's seed and the request id.

        Every request without a seed gets its own.
        """
        if params.seed is not None:
            return params.seed & 0xFFFFFFFFFFFFFFFF
        return zlib.crc32(f"{self._seed} {id}".encode())

    def _admit(self) -> None:
        if self._ended:
            raise JaxserveError(f"the engine has stopped: {self._error or 'it was closed'}")
        if self._draining:
            raise JaxserveError("the engine is shutting down")
        entries, hung, waiting = 0, True, self._entering + len(self._cluster.prefix_fetch)
        for core in self._cluster.cores:
            scheduler = core.scheduler
            entries += scheduler.role is not Role.DECODE and not scheduler.hung
            hung = hung and scheduler.hung
            waiting += scheduler.waiting
        if hung:
            raise Unavailable(self._cluster.ailment or "no instance responds")
        self._queue.check(waiting, entries)

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        """The schedulers of the instances, to read from the engine's thread."""
        return tuple(core.scheduler for core in self._cluster.cores)

    @property
    def now(self) -> float:
        """The time on the clock of the instances, in seconds."""
        return self._machine.now()

    # roles, from any thread

    @property
    def roles(self) -> tuple[Role, ...]:
        """The current role of each instance."""
        return tuple(core.scheduler.role for core in self._cluster.cores)

    def set_roles(self, roles: Mapping[int, Role]) -> tuple[Role, ...]:
        """Set the roles of instances, by index, and return the roles of all. No request is lost.

        Raises InvalidValue, and changes nothing, if an index is unknown or no instance would prefill or
        decode. Raises JaxserveError if the engine has ended.
        """

        async def turned() -> tuple[Role, ...]:
            self._cluster.set_roles(roles)
            return self.roles

        return self.run(turned)

    def silence(self) -> float:
        """Return for how many seconds the engine's thread has not responded. Called from another thread."""
        return self._heartbeat.silence()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None) -> T:
        """Run `work` on the engine's loop, from another thread, and return its result.

        Raises TimeoutError, or JaxserveError if the engine ends first.
        """
        end = None if timeout is None else time.monotonic() + timeout
        asked = self.ask(work) if self._thread.is_alive() else None
        while asked is not None and (self._thread.is_alive() or asked.done()):
            try:
                return asked.result(POLL)
            except TimeoutError:
                if end is not None and time.monotonic() >= end:
                    asked.cancel()
                    raise
        raise JaxserveError(f"the engine has stopped: {self._error or 'it was closed'}")

    def ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start `work` on the engine's loop, from another thread. It never ends if the engine ends first."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    # KV of other engines, on the engine's loop

    @property
    def machine(self) -> Machine:
        """The executors, and what they were built from."""
        return self._machine

    @property
    def compiler(self) -> Compiler:
        """Compiles the structured outputs of requests."""
        return self._machine.compiler

    def kv_pages(self) -> KVPages:
        """Return what gives copies of the pages in the prefix caches."""
        return KVPages(list(zip(self.schedulers, self._machine.executors, strict=True)))

    async def copied(self) -> None:
        """Wait until the pages of ended requests have been copied to the KV tiers."""
        await self._cluster.copy_out.idle()

    def add_kv_source(self, source: KVSource) -> None:
        """Fetch KV pages from one more source from now on."""
        self._cluster.prefix_fetch.add_source(source)

    def prefetch(self, prompt: Sequence[int], salt: bytes, kv_from: str, source: KVSource, patience: float) -> None:
        """Fetch the KV of a prompt into the prefix cache of the instance for prompts with the most room."""
        whole = (*prompt, 0)  # a request looks up the pages before its last token, and its first token comes
        request = Request(
            next(self._ids), NewRequest(whole, REHEARSED, NO_SLO, salt=salt, kv_from=kv_from), self._machine.now()
        )
        cores = [core for core in self._cluster.cores if core.scheduler.role is not Role.DECODE]
        core = max(cores, key=lambda core: (not core.scheduler.hung, core.scheduler.blocks.available))
        self._cluster.prefix_fetch.ahead(request, core, source, patience)

    # the engine's thread

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """End every unfinished request, after new ones are refused: a later one would wait forever."""
        with self._lock:
            self._ended = True
            if error is not None and self._error is None:
                self._error = cause(error)
                log.error("the engine failed: %s", self._error, exc_info=error)
            listeners, self._listeners = self._listeners, {}
        reason = "abort" if self._error is None else "error"
        why = None if self._error is None else f"the engine has failed: {self._error}"
        for id, listener in listeners.items():
            try:
                listener(Delta(id, finish_reason=reason, error=why))
            except Exception:
                log.exception("the callback of request %d failed when the engine ended", id)
        self._gc_control.end()  # also if the engine failed: automatic collection must be on again

    async def _serve(self) -> None:
        running = asyncio.ensure_future(self._cluster.run())
        tending = asyncio.ensure_future(self._gc_control.tend())
        stop = asyncio.ensure_future(self._stop.wait())
        tasks: list[asyncio.Future[Any]] = [running, tending, stop]
        if self._events is not None:
            tasks.append(asyncio.ensure_future(self._publish(self._events)))
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        failed = next((error for task in ended if (error := task.exception()) is not None), None)
        if failed is not None:
            self._end(failed)  # before waiting for devices
        elif self._machine.tiers.first is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(COPYING):
                    await self._cluster.copy_out.idle()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._events is not None:
            self._events.close()
        self._machine.keep_profile(self._cluster)
        self._left = not await self._machine.close()

    async def _publish(self, events: KVEventFeed) -> None:
        while True:
            try:
                events.publish()
            except Exception:  # routers may miss events; requests must not
                log.exception("KV events could not be published")
            await asyncio.sleep(PERIOD)

    def _slack(self) -> float:
        """Return the seconds for which the engine's thread may pause without making a token late.

        inf if nothing runs.
        """
        now = self._machine.now()
        schedulers = [core.scheduler for core in self._cluster.cores]
        return least_slack((max(now, scheduler.ends), scheduler) for scheduler in schedulers)

    def _enter(self, request: Request) -> None:
        with self._lock:  # in one piece, so that `_admit` counts the request once: as entering or as waiting
            self._entering -= 1
            on_delta = self._listeners.get(request.id)
            if on_delta is not None:  # otherwise the engine has ended, and so has the request
                self._route(request, on_delta)

    def _route(self, request: Request, on_delta: Callable[[Delta], None]) -> None:
        def tell(delta: Delta) -> None:
            if delta.finish_reason is not None:
                self._listeners.pop(request.id, None)
            on_delta(delta)

        try:
            self._cluster.submit(request, tell)
        except Unavailable as error:
            tell(Delta(request.id, finish_reason=UNAVAILABLE, error=str(error)))
        except InvalidValue as error:
            tell(Delta(request.id, finish_reason="rejected", error=str(error)))
        except Exception as error:  # without a final delta the client would wait forever
            log.exception("routing request %d failed", request.id)
            if request.id in self._listeners:
                tell(Delta(request.id, finish_reason="error", error=f"routing failed: {error}"))

    def _finished(self, request: Request) -> None:
        predicted = self._cluster.ttft_predictions.predicted(request)
        if self.recorder is not None:
            self.recorder.finished(request, predicted)
        self._over[request.id] = RequestMetrics.of(request, predicted)  # without its tokens, which may be many
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._queue.ended()
        if self._events is not None:
            self._events.ended(request)
        handed_over = request.id in self._handed_over
        self._handed_over.discard(request.id)
        if handed_over and request.finish_reason == "length":
            return  # it ends on the engine that continues it
        self._reasons[request.finish_reason or "error"] += 1
        if request.finish_reason == "abort":
            return  # the client left: neither attained nor missed
        self._tallies.add(request, self._cluster.ttft_predictions.error(request))

    # the engine as a whole

    @property
    def healthy(self) -> bool:
        """Whether requests should be sent to this engine; `ailment` says why not."""
        return self.ailment is None

    @property
    def ailment(self) -> str | None:
        """Why requests should be sent elsewhere, or None.

        The engine has failed, a step hangs, or the last steps of an instance all failed.
        """
        if self._error is not None:
            return f"the engine has failed: {self._error}"
        silent = self.silence()
        if silent > SILENT:
            return f"the engine's thread has not responded for {silent:.0f} s"
        return self._cluster.ailment

    def stats(self) -> Stats:
        """Return a snapshot. It is read without a lock: each number is right when it is read.

        Headroom and activity are of the last `measure`.
        """
        fetches = self._cluster.prefix_fetch
        schedulers = [(core.name, core.scheduler, fetches.waiting(core)) for core in self._cluster.cores]
        kv_transfers, compiled = self._cluster.kv_transfers, self._machine.compiled
        programs = self._machine.programs
        return Stats(
            tuple(
                InstanceStats(
                    name,
                    scheduler.role.value,
                    scheduler.running,
                    scheduler.waiting + held,
                    scheduler.limits.pages,
                    scheduler.blocks.held,
                    scheduler.prefill_backlog,
                    room,
                    scheduler.pinned,
                    now,
                )
                for (name, scheduler, held), room, now in zip(schedulers, self._headroom, self._activity, strict=True)
            ),
            Counters.total(scheduler.counters for _, scheduler, _ in schedulers),
            len(kv_transfers),
            kv_transfers.transfers,
            kv_transfers.seconds,
            dict(self._reasons),
            self._tallies.stats(),
            self._tallies.by_prompt(),
            compiled.compilations_total,
            compiled.after_warmup,
            compiled.cache_loads_total,
            self._stalls.count,
            self._stalls.seconds,
            tuple(self._stalls.sizes),
            dict(self._gc_control.collections),
            self._gc_control.seconds,
            deflections=self._cluster.deflections,
            reroutes=self._cluster.reroutes,
            role_changes=self._cluster.role_changes,
            unkept_programs=compiled.unkept_total,
            traces=compiled.traces_total,
            programs=programs.total,
            programs_ready=programs.ready,
            programs_loaded=programs.loaded,
            programs_later=programs.later,
            ttft_predictions=dict(self._cluster.ttft_predictions.accuracy),
            journal_errors=self._machine.journal_errors,
            hung_steps=self._cluster.hung_steps,
            kv_tiers=self._machine.tiers.totals(),
            prefix_fetches=fetches.requests,
            prefix_fetch_seconds=fetches.seconds,
            prefix_fetch_pages=fetches.pages,
            prefix_fetch_unused=fetches.unused,
            prefix_fetch_failures=fetches.failures,
            kv_copies_skipped=self._cluster.copy_out.skipped,
        )

    def measure(self) -> None:
        """Update the headroom and the activity of the instances in `stats`. Call this on the engine's thread."""
        self._activity = tuple(activity(scheduler, self.now) for scheduler in self.schedulers)
        config, now, predictions = self._machine.config, self.now, self._cluster.ttft_predictions
        self._headroom = tuple(
            headroom(scheduler, now, predictions, config.slo, config.class_objectives) for scheduler in self.schedulers
        )

    async def refresh(self) -> None:
        """Measure headroom and activity; all else in `stats` is always of now. One elsewhere fetches its own here."""

        async def measured() -> None:
            self.measure()

        await self._asked(measured, None)

    async def recent(self, since: int) -> Recent:
        """Return the events and the ended requests since a number that an earlier `Recent` had; 0: all that are kept.

        Nothing without `dashboard`.
        """

        async def recorded() -> Recent:
            return Recent(0) if self.recorder is None else self.recorder.recent(since)

        return await self._asked(recorded, Recent(0))

    async def life(self, id: int, client: str | None) -> RequestLife | None:
        """Return the recorded life of a request; None if it is unknown, or not of this client. client: None: any."""

        async def recorded() -> RequestLife | None:
            return None if self.recorder is None else self.recorder.life(id, client)

        return await self._asked(recorded, None)

    async def _asked(self, work: Callable[[], Coroutine[Any, Any, T]], otherwise: T) -> T:
        """Return the result of `work` on the engine's loop, asked from another one; `otherwise` if it has ended."""
        with suppress(JaxserveError, RuntimeError):
            if self._thread.is_alive():
                return await asyncio.wrap_future(self.ask(work))
        return otherwise

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the others to end; return False if some did not."""
        self._draining = True
        try:
            self.run(self._cluster.drained, timeout)
        except TimeoutError:
            return False
        return True

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return False, and change nothing, if requests run or wait."""
        return asyncio.run_coroutine_threadsafe(self._cluster.reset_prefix_cache(), self._loop).result()

    def end_session(self, session: str) -> bool:
        """Release the pages that a session keeps between turns; return whether it kept any. Raises JaxserveError."""

        async def ended() -> bool:
            return self._cluster.end_session(session)

        return self.run(ended)

    def profile(self, on: bool) -> bool:
        """Start or end a trace of this process in `profile_dir`. Raises JaxserveError."""
        return self._profiler.set(on)

    def check(self) -> None:
        """Raise AssertionError if a page, slot or request is lost. Call this only when idle."""

        async def checked() -> None:
            self._cluster.check()

        self.run(checked)

    def close(self) -> bool:
        """Close the engine and abort running requests.

        Returns False if something on a device does not end within CLOSING seconds; the threads that
        wait for it then stay until the process ends.
        """
        self._draining = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSING + SLACK)
        if self._thread.is_alive():
            self._end(JaxserveError("the engine was closed, and its thread did not end"))
            return False
        self._loop.close()
        self._gc_control.end()
        if self._left:
            log.error("a step or a KV transfer did not end within %g s; the threads that wait for it stay", CLOSING)
        return not self._left
