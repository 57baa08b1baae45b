"""A front's end of a connection: an engine in another process, used as if it were in this one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from jaxserve.engine.runtime.flight_recorder import Recent, RequestLife
from jaxserve.engine.runtime.info import EngineInfo, Stats
from jaxserve.engine.runtime.queue import Queue
from jaxserve.fleet import messages
from jaxserve.fleet.reports import Receiver, Update
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.errors import InvalidValue, JaxserveError, Unavailable
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.plan import UNAVAILABLE, Delta
from jaxserve.sched.api.policy import Role
from jaxserve.sched.scaling.base import Arriving
from jaxserve.version import __version__
from jaxserve.wire.address import Address
from jaxserve.wire.connection import Connection, encode

T = TypeVar("T")

GREETING = 20.0  # seconds until an engine that listens must have said hello
SEEDS = (1 << 64) - 1
REFRESHING = 1.0  # seconds for a snapshot of now; then the last one serves
DRIFT = 1e-5  # seconds between two reports by which the clocks of two machines may drift apart
REMEMBERED = 4096  # ended requests with times that `record` has not returned yet


class RemoteEngine:
    """An engine in another process. All methods belong to one loop, unless they say otherwise.

    It has the methods of `Engine` that a server uses. `submit` returns before the engine has seen the
    request: one that it does not accept ends with reason "rejected", and `refusal` has the error.
    """

    tick = 1.0  # seconds between two looks at whether the engine has said anything
    silent = 30  # looks in a row without a message, after which a process that hangs counts as lost

    def __init__(self, name: str = "the engine process") -> None:
        """Use `connect` instead. name: what error messages call the engine."""
        self.name = name
        self.info: EngineInfo
        self.kv = ""  # where other engines get KV of this one; "": nowhere
        self._stats: Stats
        self._ailment: str | None = None
        self.leaving = False  # it finishes its requests, and ends
        self.arriving = Arriving()  # at the engine, from all fronts
        self._silent = 0  # looks since the last message: not a time, as this process may have stood still itself
        self._look: asyncio.TimerHandle | None = None
        self._instances: Receiver
        self._ahead = inf  # seconds to add to times of the engine
        self._queue: Queue
        self._loop = asyncio.get_running_loop()
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._over: OrderedDict[int, RequestMetrics] = OrderedDict()
        self._refusals: OrderedDict[int, JaxserveError] = OrderedDict()  # like _over
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[int, Callable[[Delta], None]] = {}
        self._last: NewRequest | None = None  # the last one that was sent whole
        self._gone: str | None = None  # that the connection is lost, and why
        self.on_lost: Callable[[str], None] = lambda why: None
        self.updates: dict[int, Update]  # of all instances, when the engine was connected
        self.on_report: Callable[[dict[int, Update], int], None] = lambda updates, mark: None
        self._connection: Connection

    @classmethod
    async def connect(cls, address: Address, key: bytes, name: str = "the engine process") -> RemoteEngine:
        """Connect to an engine that is ready.

        Raises InvalidValue if none answers at the address, it has another key, or another version.
        """
        engine = cls(name)

        def protocol() -> Connection:
            engine._connection = Connection(
                key, "front", opened=lambda connection: None, received=engine._received, lost=engine._lost
            )
            return engine._connection

        await address.connect(protocol)
        try:
            async with asyncio.timeout(GREETING):
                await engine._greeted
        except TimeoutError:
            engine.close()
            raise InvalidValue(f"{name} at {address} said nothing within {GREETING:g} s", "address") from None
        except JaxserveError as error:
            engine.close()
            raise InvalidValue(f"{name} at {address}: {error}", "address") from None
        return engine

    # requests

    def submit(self, request: NewRequest, on_delta: Callable[[Delta], None]) -> int:
        """Submit a request and return its id. `on_delta` is called on this loop.

        Raises Unavailable if the connection is lost, or `crowded`.
        """
        if self._gone is not None:
            raise Unavailable(self._gone)
        if self.crowded:
            raise Unavailable(f"{self.name} has not yet read the requests before this one: try again later")
        id, seed = next(self._ids), request.params.seed
        if seed is not None and not 0 <= seed <= SEEDS:  # what the engine uses, and what a message can hold
            request = replace(request, params=replace(request.params, seed=seed & SEEDS))
        repeat = messages.Repeat.of(self._last, id, request)
        self._send(messages.Submit(id, request) if repeat is None else repeat)
        if repeat is None:
            self._last = request
        self._listeners[id] = on_delta
        return id

    @property
    def crowded(self) -> bool:
        """Whether requests wait for the engine to read those before them."""
        return self._connection.crowded

    def prefetch(self, prompt: Sequence[int], salt: bytes, kv_from: str) -> None:
        """Let the engine fetch the KV of a prompt while the engine at `kv_from` computes it."""
        if self._gone is None and not self.crowded:
            self._send(messages.Prefetch(tuple(prompt), salt, kv_from))

    def check_outputs(self, prompts: int, n: int, instances: int | None = None) -> None:
        """Raise InvalidValue if the queue can never hold `n` outputs of each of `prompts` prompts.

        instances: those that take prompts; None: of this engine.
        """
        self._queue.check_outputs(prompts, n, self.entries if instances is None else instances)

    @property
    def entries(self) -> int:
        """The number of instances that take prompts."""
        return sum(role is not Role.DECODE for role in self.roles)

    def cancel(self, request: int, reason: str = "abort") -> None:
        """End a request early; no effect if it has ended."""
        if request in self._listeners:
            self._send(messages.Cancel(request, reason))

    def record(self, request: int) -> RequestMetrics | None:
        """Return the times of a finished request, once."""
        return self._over.pop(request, None)

    def refusal(self, request: int) -> JaxserveError | None:
        """Return why the engine did not accept a request, once; None if it did."""
        return self._refusals.pop(request, None)

    # the engine as a whole

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each instance, as of the last State."""
        return tuple(Role(instance.role) for instance in self._stats.instances)

    def follow(self, on_report: Callable[[dict[int, Update], int], None]) -> None:
        """Ask for reports of the instances; `on_report` gets what has changed, and the last request that it shows."""
        self.on_report = on_report
        self._send(messages.Follow())

    @property
    def healthy(self) -> bool:
        """Whether requests should be sent to this engine; `ailment` says why not."""
        return self.ailment is None

    @property
    def ailment(self) -> str | None:
        """Why requests should be sent elsewhere, or None."""
        return self._ailment if self._gone is None else self._gone

    def stats(self) -> Stats:
        """Return the engine's last snapshot, see `refresh`."""
        return self._stats

    async def refresh(self) -> None:
        """Fetch a snapshot of now; keeps the last one if the engine does not respond."""
        if self._gone is None:
            try:
                async with asyncio.timeout(REFRESHING):
                    await self._call(messages.GetStats)
            except (TimeoutError, JaxserveError):
                return

    async def recent(self, since: int) -> Recent:
        """Return what has happened since, as `Engine.recent`; nothing if the engine does not respond."""
        with suppress(TimeoutError, JaxserveError):
            async with asyncio.timeout(REFRESHING):
                events: Recent = await self._call(messages.GetRecent, since)
                return events
        return Recent(since)

    async def life(self, id: int, client: str | None) -> RequestLife | None:
        """Return what is known of a request, as `Engine.life`. Raises Unavailable if the engine has ended."""
        life: RequestLife | None = await self._call(messages.GetLife, id, client)
        return life

    def set_roles(self, roles: Mapping[int, Role]) -> tuple[Role, ...]:
        """Set the roles of instances, as `Engine.set_roles`; called from another thread."""
        self._ask(messages.SetRoles, dict(roles))
        self._ask(messages.GetStats)
        return self.roles

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, as `Engine.reset_prefix_cache`; called from another thread."""
        return bool(self._ask(messages.ResetPrefixCache))

    def end_session(self, session: str) -> bool:
        """Release the pages of a session, as `Engine.end_session`; called from another thread."""
        return bool(self._ask(messages.EndSession, session))

    def profile(self, on: bool) -> bool:
        """Start or end a trace of the engine's process, as `Engine.profile`; called from another thread."""
        return bool(self._ask(messages.Profile, on))

    def restart(self, patience: float) -> None:
        """Ask the engine to finish its requests, up to `patience` seconds, and to start again. It is lost soon."""
        self._send(messages.Restart(patience))

    def stay(self) -> None:
        """Ask an engine that is `leaving` to take requests again."""
        self._send(messages.Stay())

    @property
    def lost(self) -> bool:
        return self._gone is not None

    def close(self) -> bool:
        """Disconnect. The engine cancels what was submitted here."""
        self._connection.close()
        return True

    # messages

    def _send(self, message: messages.FromFront) -> None:
        self._connection.send(encode(message))

    async def _call(self, kind: Any, *args: Any) -> Any:
        if self._gone is not None:
            raise Unavailable(self._gone)
        number = next(self._ids)
        answer = self._calls[number] = self._loop.create_future()
        try:
            self._send(kind(number, *args))
            return await answer
        finally:
            self._calls.pop(number, None)

    def _ask(self, kind: Any, *args: Any) -> Any:
        """Call from another thread, and wait for the answer."""
        return asyncio.run_coroutine_threadsafe(self._call(kind, *args), self._loop).result()

    def _listen(self) -> None:
        """Give the engine up if it has been silent for long: what it computes continues elsewhere, or ends."""
        self._silent += 1
        if self._silent > self.silent:
            self._connection.close(f"it has not responded for {self.silent * self.tick:g} s")
        else:
            self._look = self._loop.call_later(self.tick, self._listen)

    def _received(self, frame: bytes) -> None:
        self._silent = 0
        try:
            message = messages.decode_from_engine(frame)
            if isinstance(message, messages.Hello):
                self._instances = Receiver(message.limits)
            updates = self._read(message)
        except ValueError as error:
            self._connection.close(f"a message that cannot be decoded: {error}; is it another version?")
            return
        match message:
            case messages.Outputs():
                for id, times in message.ended.items():
                    _remember(self._over, id, times)
                for delta in message.deltas:
                    self._deliver(delta)
            case messages.Report():
                self.on_report(updates, message.mark)
            case messages.State():
                self._see(message)
            case messages.Refused():
                _remember(self._refusals, message.id, message.failure.error())
                self._deliver(Delta(message.id, finish_reason="rejected", error=message.failure.message))
            case messages.Answer() if message.failure is not None:
                self._answered(message.call, error=message.failure.error())
            case messages.Answer() | messages.RecentAnswer() | messages.LifeAnswer():
                self._answered(message.call, message.value)
            case messages.Hello():
                self.updates = updates
                self._greet(message)

    def _greet(self, message: messages.Hello) -> None:
        if message.version != __version__:
            self._connection.close(f"it is jaxserve {message.version}, this is {__version__}: install one version")
            return
        self.info, self.kv = message.info, message.kv
        self._queue = Queue(message.queue, time.monotonic)
        self._see(message.state)
        self._listen()
        if not self._greeted.done():
            self._greeted.set_result(None)

    def _see(self, state: messages.State) -> None:
        self._stats, self._ailment = state.stats, state.ailment
        self.leaving, self.arriving = state.leaving, state.arriving
        if state.call is not None:
            self._answered(state.call)

    def _read(self, message: messages.FromEngine) -> dict[int, Update]:
        """Return what the reports in a message say, with times on the clock of this process. Raises ValueError."""
        if isinstance(message, messages.Report):
            updates = self._instances.read(message.instances)
        elif isinstance(message, messages.Hello):
            updates = self._instances.read(message.reports)
        else:
            return {}
        now = time.monotonic()
        taken = [update.snapshot.taken for update in updates.values()]
        if taken:  # the least difference that was seen is nearest to that of the clocks: no message came faster
            self._ahead = min(self._ahead + DRIFT, now - max(taken))
        return {at: replace(update, snapshot=update.snapshot.later(self._ahead)) for at, update in updates.items()}

    def _answered(self, call: int, value: Any = True, error: JaxserveError | None = None) -> None:
        waiting = self._calls.get(call)
        if waiting is None or waiting.done():
            return
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(value)

    def _deliver(self, delta: Delta) -> None:
        ended = delta.finish_reason is not None
        listener = self._listeners.pop(delta.request, None) if ended else self._listeners.get(delta.request)
        if listener is not None:
            listener(delta)

    def _lost(self, why: str) -> None:
        self._gone = f"{self.name} has ended: {why}"
        if self._look is not None:
            self._look.cancel()
        gone = Unavailable(self._gone)
        if not self._greeted.done():
            self._greeted.set_exception(gone)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(gone)
        self.on_lost(why)
        for id in list(self._listeners):
            self._deliver(Delta(id, finish_reason=UNAVAILABLE, error=str(gone)))


def _remember(ended: OrderedDict[int, T], request: int, what: T) -> None:
    ended[request] = what
    if len(ended) > REMEMBERED:
        ended.popitem(last=False)
