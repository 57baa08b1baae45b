"""The engine's end of connections: fronts submit requests, and get each step's tokens in one message.

Everything runs on the engine's own event loop. No other thread competes for the interpreter with
the scheduler, and the tokens of a step leave in one write, right after the step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import msgspec

from jaxserve.engine.engine import Engine
from jaxserve.engine.runtime.flight_recorder import Recent
from jaxserve.fleet import messages
from jaxserve.fleet.reports import Feed, InstanceReport
from jaxserve.kv.exchange import KVExchange
from jaxserve.kv.share import KVShare
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.errors import JaxserveError, Unavailable
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.policy import Role
from jaxserve.sched.scaling.base import Arrivals
from jaxserve.version import __version__
from jaxserve.wire.address import Address
from jaxserve.wire.connection import Connection, encode

log = logging.getLogger(__name__)

SHARING = 1.0  # seconds between two States
REPORTING = 0.05  # least seconds between two Reports: a front counts what it sent since the last one itself
LEAVING = "this replica takes no more requests"
POLL = 0.02  # seconds between two looks at the requests of an engine that starts again, or at a slow front


class EngineServer:
    """Serves an engine to fronts. Writer: the engine's thread."""

    def __init__(self, engine: Engine, key: bytes, share: KVShare | None = None) -> None:
        """share: how this process exchanges KV with others; None: it does not."""
        self.engine = engine
        self.exchange = None if share is None else KVExchange(engine, share)
        self.address: Address  # set by `start`
        self._key = key
        self._fronts = set[_Front]()
        self._unproved: dict[Connection, None] = {}
        self._feeds = [Feed(index, scheduler) for index, scheduler in enumerate(engine.schedulers)]
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._listening: asyncio.Server | None = None
        self._retiring: asyncio.Task[None] | None = None  # at the request of a front
        self._arrivals = Arrivals()
        self.on_retired: Callable[[], None] = lambda: None  # called once the process may end and start again

    def start(self, address: Address) -> Address:
        """Listen, and return the address with its port. Called from another thread. Raises InvalidValue."""
        if self.exchange is not None:
            self.exchange.start(address)
        self.address = self.engine.run(lambda: self._start(address))
        return self.address

    async def _start(self, address: Address) -> Address:
        self._listening, bound = await address.listen(self._accept)
        self._tasks = asyncio.ensure_future(self._share()), asyncio.ensure_future(self._report())
        return bound

    def close(self) -> None:
        """Stop to listen, and disconnect the fronts. Called from another thread."""

        async def closed() -> None:
            if self._listening is not None:
                self._listening.close()
            for task in (*self._tasks, self._retiring):
                if task is not None:
                    task.cancel()
            for connection in (*(front.connection for front in self._fronts), *self._unproved):
                connection.close()
            await asyncio.sleep(0)  # lets the cancelled tasks end

        if self.exchange is not None:
            self.exchange.close()
        self.engine.run(closed)

    def _accept(self) -> Connection:
        front = _Front(self)
        front.connection = Connection(
            self._key, "engine", opened=front.opened, received=front.received, lost=front.lost, unproved=self._unproved
        )
        return front.connection

    def state(self, call: int | None = None) -> messages.State:
        """Return the State of now. Called on the engine's thread."""
        self.engine.measure()
        stats = self.engine.stats()
        if self.exchange is not None:
            stats = self.exchange.described(stats)
        ailment = LEAVING if self.retiring else self.engine.ailment
        return messages.State(stats, ailment, call, self.retiring, self._arrivals.at(self.engine.now))

    @property
    def retiring(self) -> bool:
        """Whether no more requests are taken, because the engine starts again."""
        return self._retiring is not None

    def retire(self, patience: float) -> None:
        """Finish running requests, up to `patience` seconds, and then call `on_retired`.

        Fronts send no more requests once they see the next State; what is left at the end of the process
        continues elsewhere.
        """
        if self._retiring is None:
            self._retiring = asyncio.ensure_future(self._retire(patience))
            self._tell_all()

    def stay(self) -> None:
        """Take requests again after `retire`, unless that has come to its end."""
        if self._retiring is not None and not self._retiring.done():
            self._retiring.cancel()
            self._retiring = None
            self._tell_all()

    def arrived(self, request: NewRequest) -> None:
        """Count a request, unless it continues here."""
        if request.progress is None:
            self._arrivals.count(len(request.prompt), request.slo.ttft, self.engine.now)

    async def _retire(self, patience: float) -> None:
        end = asyncio.get_running_loop().time() + patience
        while any(front.busy for front in self._fronts) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(POLL)
        self.on_retired()

    def hello(self) -> messages.Hello:
        engine, exchange = self.engine, self.exchange
        info = engine.info if exchange is None else exchange.with_role(engine.info)
        kv = "" if exchange is None else str(exchange.address)
        limits = tuple(scheduler.limits for scheduler in engine.schedulers)
        reports = self._whole_reports(cache=False)
        return messages.Hello(__version__, info, engine.queue_bound, self.state(), limits, reports, kv)

    def set_roles(self, roles: Mapping[int, Role]) -> bool:
        """Set the roles of instances, or of this replica if it shares KV. Called from another thread."""
        if self.exchange is None:
            return bool(self.engine.set_roles(roles))
        self.exchange.set_roles(roles)
        return True

    def report(self, mark: int) -> messages.Report:
        """Return the first Report to a front that follows, and begin to collect events for it."""
        for feed in self._feeds:
            feed.follow(True)
        return messages.Report(mark, self._whole_reports(cache=True))

    def _whole_reports(self, *, cache: bool) -> tuple[InstanceReport, ...]:
        return tuple(feed.whole(self.engine.now, cache=cache) for feed in self._feeds)

    def join(self, front: _Front) -> None:
        self._fronts.add(front)

    def leave(self, front: _Front) -> None:
        self._fronts.discard(front)
        if not any(other.follows for other in self._fronts):
            for feed in self._feeds:
                feed.follow(False)

    async def _share(self) -> None:
        while True:
            await asyncio.sleep(SHARING)
            self._tell_all()

    def _tell_all(self) -> None:
        if self._fronts:
            state = encode(self.state())
            for front in tuple(self._fronts):
                front.connection.send(state)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORTING)
            followers = [front for front in self._fronts if front.follows]
            if followers:
                now = self.engine.now
                news = [report for feed in self._feeds if (report := feed.news(now)) is not None]
                encoded = tuple(msgspec.Raw(encode(report)) for report in news)  # once for all fronts
                for front in followers:
                    front.report(encoded)


class _Front:
    """One connected front. Writer: the engine's thread."""

    connection: Connection

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._engine = server.engine
        self._loop = asyncio.get_running_loop()
        self._compiling = set[int]()  # requests of this front whose structured outputs are being compiled
        self._running: dict[int, int] = {}  # requests of this front: its id -> the engine's
        self._deltas: list[Delta] = []  # to send
        self._ended: dict[int, RequestMetrics] = {}  # likewise
        self._flushing = False
        self._last: NewRequest | None = None  # the last one that came whole
        self._calls = set[asyncio.Task[None]]()
        self.follows = False
        self._mark = self._reported = -1  # the last request that has entered the engine, and that a Report said so of

    @property
    def busy(self) -> bool:
        """Whether requests run, or outputs are still to be sent."""
        return bool(self._running or self._deltas or self._compiling)

    def opened(self, connection: Connection) -> None:
        self._send(self._server.hello())
        self._server.join(self)

    def lost(self, why: str) -> None:
        """Cancel what the front had submitted: its clients are gone with it."""
        log.info("a front has left: %s", why)
        self._server.leave(self)
        for id in self._running.values():
            self._engine.cancel(id)
        self._running.clear()
        self._compiling.clear()

    def received(self, frame: bytes) -> None:
        try:
            message = self._whole(messages.decode_from_front(frame))
        except ValueError as error:
            self.connection.close(f"a message that cannot be decoded: {error}")
            return
        try:
            self._handle(message)
        except Exception as error:  # MemoryError, for example: other requests of the front go on
            log.exception("a message of a front could not be handled")
            if isinstance(message, messages.Submit):
                self._refuse(message.id, Unavailable(f"the engine cannot take it: {error!r:.200}"))

    def _handle(self, message: messages.FromFront) -> None:
        match message:
            case messages.Submit() if message.request.params.structured_outputs is not None:
                self._compile(message)
            case messages.Submit():
                self._submit(message)
            case messages.Cancel():
                self._cancel(message)
            case messages.GetStats():
                self._send(self._server.state(message.call))
            case messages.GetRecent() | messages.GetLife():
                self._find(message)
            case messages.Prefetch():
                if self._server.exchange is not None:
                    self._server.exchange.prefetch(message.prompt, message.salt, message.kv_from)
            case messages.SetRoles():
                self._call(message.call, lambda: self._server.set_roles(message.roles))
            case messages.ResetPrefixCache():
                self._call(message.call, self._engine.reset_prefix_cache)
            case messages.EndSession():
                self._call(message.call, lambda: self._engine.end_session(message.session))
            case messages.Profile():
                self._call(message.call, lambda: self._engine.profile(message.on))
            case messages.Follow():
                self.follows = True
                self._send(self._server.report(self._mark))
            case messages.Restart():
                self._server.retire(message.patience)
            case messages.Stay():
                self._server.stay()

    def _find(self, message: messages.GetRecent | messages.GetLife) -> None:
        recorder = self._engine.recorder
        if isinstance(message, messages.GetRecent):
            recent = Recent(0) if recorder is None else recorder.recent(message.since)
            self._send(messages.RecentAnswer(message.call, recent))
        else:
            life = None if recorder is None else recorder.life(message.request, message.client)
            self._send(messages.LifeAnswer(message.call, life))

    def _whole(self, message: messages.FromFront) -> messages.FromFront:
        """Complete a Repeat. Raises ValueError if there is nothing that it could repeat."""
        if isinstance(message, messages.Repeat):
            if self._last is None:
                raise ValueError("a Repeat before a Submit")
            return messages.Submit(message.id, message.request(self._last))
        if isinstance(message, messages.Submit):
            self._last = message.request
        return message

    def _cancel(self, message: messages.Cancel) -> None:
        id = self._running.get(message.id)
        if id is not None:
            self._engine.cancel(id, message.reason)
        elif message.id in self._compiling:
            self._compiling.discard(message.id)
            self._deliver(message.id, Delta(-1, finish_reason=message.reason))

    def report(self, instances: Sequence[msgspec.Raw]) -> None:
        """Send encoded reports of the instances, if there are any or a request has entered since the last ones."""
        if instances or self._mark != self._reported:
            self._reported = self._mark
            self._send(messages.Report(self._mark, cast(Any, instances)))

    def _entered(self, id: int) -> None:
        self._mark = id

    def _send(self, message: messages.FromEngine) -> None:
        self.connection.send(encode(message))

    def _refuse(self, id: int, error: JaxserveError) -> None:
        self._send(messages.Refused(id, messages.Failure.of(error)))

    def _compile(self, message: messages.Submit) -> None:
        """Submit a request once its structured outputs are compiled, without keeping the engine's thread waiting."""
        wanted = message.request.params.structured_outputs
        assert wanted is not None
        compiling = self._engine.machine.compiler.compile(wanted)
        if compiling.done():
            self._submit(message)
            return
        self._compiling.add(message.id)

        def submitted() -> None:
            if message.id in self._compiling:  # otherwise the front has cancelled it, or is gone
                self._compiling.discard(message.id)
                self._submit(message)

        compiling.add_done_callback(lambda _: self._later(submitted))

    def _later(self, call: Callable[[], None]) -> None:
        """Call from another thread, on the engine's."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def _submit(self, message: messages.Submit) -> None:
        self._server.arrived(message.request)
        try:
            if self._server.retiring:
                raise Unavailable(LEAVING)
            id = self._engine.submit(message.request, partial(self._deliver, message.id))
        except JaxserveError as error:
            self._refuse(message.id, error)
        else:
            self._running[message.id] = id
        self._loop.call_soon(self._entered, message.id)  # after the request has entered the engine

    def _deliver(self, id: int, delta: Delta) -> None:
        """Keep a delta until the step has told all of its requests."""
        if delta.finish_reason is not None:
            self._running.pop(id, None)
            times = self._engine.record(delta.request)
            if times is not None:
                self._ended[id] = times
        self._deltas.append(delta._replace(request=id))
        if not self._flushing and not self._loop.is_closed():  # closed: the process ends, which fronts notice
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what there is, once the front has read most of what was sent before."""
        if self.connection.crowded:
            self._loop.call_later(POLL, self._flush)
            return
        self._flushing = False
        deltas, self._deltas = self._deltas, []
        ended, self._ended = self._ended, {}
        self._send(messages.Outputs(tuple(deltas), ended))

    def _call(self, number: int, work: Callable[[], bool]) -> None:
        """Run `work`, which waits for the engine's thread, in another one."""
        task = asyncio.ensure_future(self._answer(number, work))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, work: Callable[[], bool]) -> None:
        try:
            self._send(messages.Answer(number, await asyncio.to_thread(work)))
        except JaxserveError as error:
            self._send(messages.Answer(number, failure=messages.Failure.of(error)))
