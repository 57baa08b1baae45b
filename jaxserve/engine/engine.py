"""One thread with an event loop of its own that owns the cluster: every decision and every dispatch is made there.

Callers on other threads hand requests in and hear of their tokens by callback; tokenising and detokenising are
theirs. A failure of one request is told to that request; a failure of the machinery ends all and is told to all.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jaxserve.config import ServeConfig
from jaxserve.engine.assemble import Machine, assemble
from jaxserve.engine.classes import Tallies
from jaxserve.engine.hygiene import Hygiene, Stalls, least_slack, watched_loop
from jaxserve.engine.info import EngineInfo, InstanceStats, Stats
from jaxserve.engine.inputs import check_adjusted
from jaxserve.engine.warmup import Progress
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.counters import Counters
from jaxserve.sched.errors import InvalidValue, JaxserveError, QueueFull
from jaxserve.sched.forecasts import Forecasts
from jaxserve.sched.journal import REHEARSAL
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.plan import Delta
from jaxserve.sched.policy import Role
from jaxserve.sched.request import STANDARD, Request
from jaxserve.sched.slo import NO_SLO, SLO

log = logging.getLogger(__name__)

REHEARSED = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
REMEMBERED = 4096  # finished requests whose times nobody has asked for yet
REBUILDS_A_MINUTE = 3  # from this many on the engine calls itself unhealthy


class Engine:
    """Made by `start`. `submit`, `cancel`, `record`, `stats` may be called from any thread."""

    def __init__(self, config: ServeConfig, machine: Machine) -> None:
        self.info: EngineInfo = machine.info
        self._machine = machine
        self._cluster = machine.cluster(self._finished)
        self._bound: int | None = None  # none yet: the rehearsal comes first
        self._seed = config.seed
        self._ids = itertools.count()
        self._entering = 0  # handed in, not yet placed; guarded by _lock
        self._lock = threading.Lock()
        self._draining = False
        self._error: str | None = None
        self._over: OrderedDict[int, RequestMetrics] = OrderedDict()
        self._listeners: dict[int, Callable[[Delta], None]] = {}
        self._reasons: Counter[str] = Counter()
        self._classes = config.classes
        self._tallies = Tallies(self._classes.names)
        self._stalls = Stalls()
        self._hygiene = Hygiene(self._slack)
        self._loop = watched_loop(self._stalls)
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="jaxserve-engine", daemon=True)

    @classmethod
    def start(cls, config: ServeConfig, *, progress: Progress | None = None) -> Engine:
        """Load the model, compile every program, and begin to serve. Blocks until ready; raises JaxserveError."""
        return cls.on(assemble(config, progress))

    @classmethod
    def on(cls, machine: Machine) -> Engine:
        """Begin to serve on a machine that is warm. Blocks until ready; raises JaxserveError."""
        engine = cls(machine.config, machine)
        engine._thread.start()
        engine._rehearse()
        engine._hygiene.begin()
        engine._loop.call_soon_threadsafe(engine._stalls.clear)  # warm-up's are nobody's
        engine._bound = machine.config.max_num_queued_reqs
        return engine

    def _rehearse(self) -> None:
        """Serve a few short requests before the first real one: what happens once (a first transfer between two
        meshes, first calls of everything between a prompt and its tokens) is then behind us."""
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()

        def heard(delta: Delta) -> None:
            if delta.finish_reason is not None:
                ended.put(delta.error or "")

        count = 2 * len(self._cluster.cores)
        for _ in range(count):
            self.submit([0] * 3, REHEARSED, slo=NO_SLO, key=REHEARSAL, on_delta=heard)
        errors = [ended.get() for _ in range(count)]
        if any(errors):
            self.close()
            raise JaxserveError(f"the engine failed at its first request: {max(errors)}")
        for core in self._cluster.cores:
            core.scheduler.counters = Counters()
        for seen in (self._over, self._reasons):
            seen.clear()
        self._tallies = Tallies(self._classes.names)
        self._cluster.mover.transfers, self._cluster.mover.seconds = 0, 0.0
        self._cluster.forecasts, self._cluster.deflections = Forecasts(), 0

    # requests, from any thread

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        slo: SLO,
        priority: int = 0,
        tier: str = STANDARD,
        key: str = "",
        salt: bytes = b"",
        waited: float = 0.0,
        on_delta: Callable[[Delta], None],
    ) -> int:
        """Hand a request in; returns its id at once. News come to `on_delta`, in the engine's thread. In the prefix
        cache it finds only pages of requests with the same `salt`. It arrived `waited` seconds ago.

        Raises InvalidValue where it cannot be served, QueueFull where too many wait, JaxserveError when the engine
        is ending.
        """
        self._check(prompt, params)
        id = next(self._ids)
        request = Request(
            id,
            tuple(prompt),
            params,
            slo,
            self._machine.now() - waited,
            seed=self._seed_of(params, id),
            priority=priority,
            tier=tier,
            eos=self.info.eos,
            thinking=self.info.thinking.after(prompt) if slo.stages else None,
            limit=min(params.max_tokens or self.info.max_model_len, self.info.max_model_len - len(prompt)),
            key=key,
            salt=salt,
            class_=self._classes.of(tier, slo),
        )
        with self._lock:
            self._admit()
            self._entering += 1
        self._loop.call_soon_threadsafe(self._enter, request, on_delta)
        return request.id

    def cancel(self, request: int, reason: str = "abort") -> None:
        """End a request early; nothing where it is over."""
        self._loop.call_soon_threadsafe(self._cluster.cancel, request, reason)

    def record(self, request: int) -> RequestMetrics | None:
        """The times of a finished request, once; None where it is unknown, was told or is long over."""
        return self._over.pop(request, None)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        info = self.info
        if not prompt:
            raise InvalidValue("the prompt is empty: at least one token is needed", "prompt")
        if len(prompt) >= info.max_model_len:
            raise InvalidValue(
                f"the prompt has {len(prompt)} tokens, and max_model_len={info.max_model_len} must hold it and at "
                "least one token of output",
                "prompt",
            )
        check_adjusted(params, tuple(info.eos))
        wrong = [token for token in prompt if not 0 <= token < info.vocab_size]
        if wrong:
            raise InvalidValue(f"token id {wrong[0]} must be between 0 and {info.vocab_size - 1}", "prompt")
        wrong = [token for token, _ in params.logit_bias if not 0 <= token < info.vocab_size]
        if wrong:
            raise InvalidValue(f"logit_bias of token {wrong[0]}: ids go from 0 to {info.vocab_size - 1}", "logit_bias")

    def _seed_of(self, params: SamplingParams, id: int) -> int:
        """A request without a seed gets one from the engine's seed and its own number: no two share their luck."""
        if params.seed is not None:
            return params.seed & 0xFFFFFFFFFFFFFFFF
        return zlib.crc32(f"{self._seed} {id}".encode())

    def _admit(self) -> None:
        if self._error is not None:
            raise JaxserveError(f"the engine has stopped: {self._error}")
        if self._draining:
            raise JaxserveError("the engine is shutting down")
        waiting = self._entering + sum(core.scheduler.waiting for core in self._cluster.cores)
        if self._bound is not None and waiting >= self._bound:
            raise QueueFull(f"{waiting} requests wait, and max_num_queued_reqs={self._bound}: try again later")

    # roles, from any thread

    @property
    def roles(self) -> tuple[Role, ...]:
        """What each instance is for at present."""
        return tuple(core.scheduler.role for core in self._cluster.cores)

    def set_roles(self, roles: Mapping[int, Role]) -> tuple[Role, ...]:
        """Change what instances, by index, are for; returns what all are for then. No request is lost.

        Raises InvalidValue, and changes nothing, where an instance is not there, or nobody would be left to prefill
        or to decode; JaxserveError where the engine has stopped.
        """
        if not self._thread.is_alive():
            raise JaxserveError(f"the engine has stopped: {self._error or 'it was closed'}")

        async def turned() -> tuple[Role, ...]:
            self._cluster.turn(roles)
            return self.roles

        return asyncio.run_coroutine_threadsafe(turned(), self._loop).result()

    # the engine's thread

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            log.exception("the engine failed")
            self._error = f"{type(error).__name__}: {error}"
        for id, listener in list(self._listeners.items()):
            listener(Delta(id, finish_reason="error" if self._error else "abort", error=self._error))
        self._listeners.clear()
        self._hygiene.end()  # also where the engine failed: nobody would collect any more

    async def _serve(self) -> None:
        running = asyncio.ensure_future(self._cluster.run())
        tending = asyncio.ensure_future(self._hygiene.tend())
        stop = asyncio.ensure_future(self._stop.wait())
        tasks: list[asyncio.Future[Any]] = [running, tending, stop]
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._machine.close()
        for one in ended:
            one.result()

    def _slack(self) -> float:
        """Seconds for which the engine's thread may be away without making anything late; inf where nothing runs."""
        now = self._machine.now()
        schedulers = [core.scheduler for core in self._cluster.cores]
        return least_slack((max(now, one.ends), one) for one in schedulers)

    def _enter(self, request: Request, on_delta: Callable[[Delta], None]) -> None:
        with self._lock:
            self._entering -= 1

        def tell(delta: Delta) -> None:
            if delta.finish_reason is not None:
                self._listeners.pop(request.id, None)
            on_delta(delta)

        self._listeners[request.id] = on_delta
        try:
            self._cluster.submit(request, tell)
        except InvalidValue as error:
            tell(Delta(request.id, finish_reason="rejected", error=str(error)))
        except Exception as error:  # its client would wait for ever
            log.exception("placing request %d failed", request.id)
            if request.id in self._listeners:
                tell(Delta(request.id, finish_reason="error", error=f"placing it failed: {error}"))

    def _finished(self, request: Request) -> None:
        self._over[request.id] = RequestMetrics.of(request)  # none of its tokens, which may be many
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._reasons[request.finish_reason or "error"] += 1
        if request.finish_reason == "abort":
            return  # its client went away: neither kept nor broken
        self._tallies.add(request, self._cluster.forecasts.error(request))

    # the whole

    @property
    def healthy(self) -> bool:
        """False once the machinery has failed, or three pools had to be rebuilt within a minute."""
        since = self._machine.now() - 60.0
        return self._error is None and sum(at > since for at in self._cluster.rebuilt) < REBUILDS_A_MINUTE

    def stats(self) -> Stats:
        """A snapshot. Read without a lock: single numbers, each right at its moment."""
        schedulers = [(core.name, core.scheduler) for core in self._cluster.cores]
        mover, compiled = self._cluster.mover, self._machine.compiled
        return Stats(
            tuple(
                InstanceStats(
                    name,
                    one.role.value,
                    one.running,
                    one.waiting,
                    one.limits.pages,
                    one.blocks.held,
                    one.prefill_backlog,
                )
                for name, one in schedulers
            ),
            Counters.total(one.counters for _, one in schedulers),
            len(mover),
            mover.transfers,
            mover.seconds,
            dict(self._reasons),
            self._tallies.stats(),
            compiled.compilations_total,
            compiled.after_warmup,
            compiled.cache_loads_total,
            self._stalls.count,
            self._stalls.seconds,
            tuple(self._stalls.sizes),
            dict(self._hygiene.collections),
            self._hygiene.seconds,
            deflections=self._cluster.deflections,
            unkept_programs=compiled.unkept_total,
            forecasts=dict(self._cluster.forecasts.accuracy),
        )

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the others to end; False where some were left."""
        self._draining = True
        done: Future[None] = asyncio.run_coroutine_threadsafe(self._cluster.drained(), self._loop)
        try:
            done.result(timeout)
        except TimeoutError:
            done.cancel()
            return False
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing is forgotten, where requests are running or waiting."""
        return asyncio.run_coroutine_threadsafe(self._cluster.reset_prefix_cache(), self._loop).result()

    def check(self) -> None:
        """Raises AssertionError where a page, a slot or a request is lost. Call it when nothing runs."""

        async def checked() -> None:
            self._cluster.check()

        asyncio.run_coroutine_threadsafe(checked(), self._loop).result()

    def close(self) -> None:
        """End the engine; what is running is aborted."""
        self._draining = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._loop.close()
        self._hygiene.end()
