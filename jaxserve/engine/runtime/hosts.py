"""An instance on a mesh that spans several processes: one leader, the others follow.

Every process of a mesh must dispatch the same programs in the same order, or collectives deadlock.
The leader has the scheduler and the executor, and sends every dispatch to the followers before it
dispatches itself. Followers dispatch exactly what they receive. When the leader stops after a
segment, all processes have therefore stopped after the same one.

Messages are pickled, between processes of one job that share a key: never accept other connections.
Messages are sent from the dispatching thread, and few are outstanding: the leader submits a step
only after the results of the steps ahead, to which the followers contribute.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax

from jaxserve.engine.memory.transfer import Piece
from jaxserve.engine.programs.inputs import Batch, Int32
from jaxserve.engine.programs.segments import Walk
from jaxserve.engine.runtime.device_state import Computed, DeviceState, StepOutputs
from jaxserve.sched.api.errors import InvalidValue, JaxserveError
from jaxserve.sched.api.plan import Begin, Span
from jaxserve.structured.token_filter import Words

Address = tuple[str, int]
Message = tuple[Any, ...]  # a method of `Follower` and its arguments


class OutOfStep(JaxserveError):
    """The processes of an instance dispatch different programs; all of them must be restarted."""


class _Numbered(Walk):
    """A walk with a number by which followers know it."""

    __slots__ = ("number",)

    def __init__(self, walk: Walk, number: int) -> None:
        super().__init__(walk.batch, walk.total)
        self.number = number


class Leading(DeviceState):
    """The leader's device state, mirrored by its followers. It can neither export nor import pages."""

    def __init__(self, state: DeviceState, followers: Sequence[Connection[Any, Any]]) -> None:
        """Take over a warm `state`, which must not be used any more.

        followers: one connection to each other process of the mesh. Raises InvalidValue if their number
        is wrong or their programs differ.
        """
        vars(self).update(vars(state))
        self._followers = tuple(followers)
        self._numbers = count(1)
        self._lost: str | None = None
        processes = len({device.process_index for device in self.mesh.devices.flat})
        if len(followers) != processes - 1:
            raise InvalidValue(
                f"{len(followers)} followers for a mesh over {processes} processes: all processes but one must follow"
            )
        mine = _facts(state)
        for follower in followers:
            for name, theirs in follower.recv().items():
                if theirs != mine[name]:
                    raise InvalidValue(
                        f"{name} differs between hosts: {mine[name]} on the leader, {theirs} on a follower"
                    )

    def close(self) -> None:
        """Tell the followers to return."""
        for follower in self._followers:
            with suppress(OSError):  # it is gone
                follower.send(None)
            follower.close()

    @contextmanager
    def _told(self, *message: Any) -> Iterator[None]:
        """Send a message to the followers before the block does the same here."""
        if self._lost is not None:
            raise OutOfStep(self._lost)
        try:
            for follower in self._followers:
                _tell(follower, message)
            yield
        except BaseException as error:
            self._lost = f"{message[0]} failed ({type(error).__name__}: {error}): end all processes of the instance"
            raise

    def rebuild(self) -> None:
        with self._told("rebuild"):
            super().rebuild()

    def step(self, batch: Batch, spans: Sequence[Span] = ()) -> tuple[StepOutputs, jax.Array]:
        with self._told("step", batch, self._follows(spans)):
            return super().step(batch, spans)

    def walk(self, batch: Batch) -> Walk | None:
        walk = super().walk(batch)
        return None if walk is None else _Numbered(walk, next(self._numbers))

    def segment(self, walk: Walk) -> jax.Array:
        assert isinstance(walk, _Numbered)
        with self._told("segment", walk.number, walk.at, None if walk.at else walk.batch):
            return super().segment(walk)

    def end(self, walk: Walk, spans: Sequence[Span] = ()) -> tuple[StepOutputs, jax.Array]:
        assert isinstance(walk, _Numbered)
        with self._told("end", walk.number, self._follows(spans)):
            return super().end(walk, spans)

    def compute(self, batch: Batch, forced: Words | None = None) -> Computed:
        with self._told("compute", batch, forced):
            return super().compute(batch, forced)

    def finish(self, walk: Walk) -> Computed:
        assert isinstance(walk, _Numbered)
        with self._told("finish", walk.number):
            return super().finish(walk)

    def choose(
        self, batch: Batch, spans: Sequence[Span], computed: Computed, rows: Words | None, ahead: Words | None
    ) -> tuple[StepOutputs, jax.Array]:
        with self._told("choose", self._follows(spans), rows, ahead):
            return super().choose(batch, spans, computed, rows, ahead)

    def _follows(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Return the spans that followers need: only drafters read them."""
        return () if self.drafter is None else spans

    def score(self, hidden: jax.Array, begin: int, targets: Int32) -> list[tuple[Int32, jax.Array]]:
        """Score targets of the step dispatched last."""
        with self._told("score", begin, targets):
            return super().score(hidden, begin, targets)

    def pool(self, hidden: jax.Array, parts: Sequence[tuple[int, int]]) -> jax.Array:
        """Sum parts of the step dispatched last."""
        with self._told("pool", parts):
            return super().pool(hidden, parts)

    def remember(self, slot: int, begin: Begin) -> None:
        with self._told("remember", slot, begin):
            super().remember(slot, begin)

    def begin(self, slot: int, begin: Begin, start: int) -> None:
        if self.drafter is not None:
            with self._told("begin", slot, begin, start):
                super().begin(slot, begin, start)

    def scrub(self, pages: Sequence[int], bucket: int) -> None:
        with self._told("scrub", pages, bucket):
            super().scrub(pages, bucket)

    def export(self, pages: Int32) -> Piece:
        raise JaxserveError("an instance that spans hosts cannot export pages: use a mesh of one instance")

    def receive(self, piece: Sequence[Any]) -> Piece:
        if isinstance(piece[0], jax.Array):
            raise JaxserveError("an instance that spans hosts cannot import pages: use a mesh of one instance")
        return super().receive(piece)


def _tell(follower: Connection[Any, Any], message: Message) -> None:
    try:
        if follower.poll():
            raise OutOfStep(follower.recv())
        follower.send(message)
    except (EOFError, OSError) as error:
        raise OutOfStep("a follower closed its connection") from error


class Follower:
    """A process that repeats the leader's dispatches; each method is a message. Writer: `follow`."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._walks: dict[int, Walk] = {}  # in progress
        self._hidden: jax.Array | None = None  # of the step dispatched last
        self._computed: tuple[Batch, Computed] | None = None  # a step whose masks are not here yet

    def obey(self, message: Message) -> None:
        what, *args = message
        if what not in ("score", "pool"):
            self._hidden = None
        getattr(self, what)(*args)

    def rebuild(self) -> None:
        self._walks.clear()
        self._computed = None
        self._state.rebuild()

    def step(self, batch: Batch, spans: Sequence[Span]) -> None:
        _, self._hidden = self._state.step(batch, spans)

    def segment(self, number: int, at: int, batch: Batch | None) -> None:
        if batch is not None and number not in self._walks and (begun := self._state.walk(batch)) is not None:
            self._walks[number] = begun
        walk = self._found(number, f"segment {at}")
        if walk.at != at or not walk.left:
            due = f"segment {walk.at}" if walk.left else "its end"
            raise OutOfStep(f"received segment {at} of walk {number}, but {due} is next here")
        self._state.segment(walk)

    def end(self, number: int, spans: Sequence[Span]) -> None:
        _, self._hidden = self._state.end(self._finished(number), spans)

    def _finished(self, number: int) -> Walk:
        walk = self._found(number, "the end")
        if walk.left:
            raise OutOfStep(f"received the end of walk {number}, but segment {walk.at} of {walk.total} is next here")
        return self._walks.pop(number)

    def compute(self, batch: Batch, forced: Words | None) -> None:
        self._computed = batch, self._state.compute(batch, forced)

    def finish(self, number: int) -> None:
        walk = self._finished(number)
        self._computed = walk.batch, self._state.finish(walk)

    def choose(self, spans: Sequence[Span], rows: Words | None, ahead: Words | None) -> None:
        if self._computed is None:
            raise OutOfStep("received the masks of a step that was not computed here")
        batch, computed = self._computed
        self._computed = None
        _, self._hidden = self._state.choose(batch, spans, computed, rows, ahead)

    def _found(self, number: int, what: str) -> Walk:
        if number not in self._walks:
            raise OutOfStep(f"received {what} of walk {number}; in progress here are {sorted(self._walks)}")
        return self._walks[number]

    def score(self, begin: int, targets: Int32) -> None:
        if self._hidden is None:
            raise OutOfStep("received a prompt to score, but the last dispatch was not a step")
        self._state.score(self._hidden, begin, targets)

    def pool(self, parts: Sequence[tuple[int, int]]) -> None:
        if self._hidden is None:
            raise OutOfStep("received parts to sum, but the last dispatch was not a step")
        self._state.pool(self._hidden, parts)

    def remember(self, slot: int, begin: Begin) -> None:
        self._state.remember(slot, begin)

    def begin(self, slot: int, begin: Begin, start: int) -> None:
        self._state.begin(slot, begin, start)

    def scrub(self, pages: Sequence[int], bucket: int) -> None:
        self._state.scrub(pages, bucket)


def follow(state: DeviceState, leader: Connection[Any, Any]) -> None:
    """Dispatch what the leader dispatches, on a warm state, until the leader closes.

    Raises OutOfStep if a message does not fit the state here or the leader is gone. The leader learns
    of every exception before its next dispatch.
    """
    follower = Follower(state)
    with leader:
        leader.send(_facts(state))
        try:
            while (message := _heard(leader)) is not None:
                follower.obey(message)
        except Exception as error:
            with suppress(OSError):
                leader.send(f"process {jax.process_index()}: {type(error).__name__}: {error}")
            raise


def _heard(leader: Connection[Any, Any]) -> Message | None:
    """Return the next message; None at the end."""
    try:
        message: Message | None = leader.recv()
    except (EOFError, OSError) as error:
        raise OutOfStep("the leader closed its connection: end all processes of the instance") from error
    return message


def accept(listener: Listener, followers: int) -> list[Connection[Any, Any]]:
    """Accept connections from `followers` followers."""
    return [_prompt(listener.accept()) for _ in range(followers)]


def connect(leader: Address, key: bytes) -> Connection[Any, Any]:
    """Connect a follower to a leader that listens with the same key."""
    return _prompt(Client(leader, authkey=key))


def _prompt(connection: Connection[Any, Any]) -> Connection[Any, Any]:
    """Turn off the delay, up to 40 ms, that TCP adds to small messages."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _facts(state: DeviceState) -> dict[str, str]:
    """Return the facts that must be equal in all processes, so that they dispatch the same programs."""
    programs, segments = state.programs, state.segments
    return {
        "jax": jax.__version__,
        "the model": repr(programs.spec),
        "the limits of a step": repr(programs.limits),
        "the mesh": repr([device.id for device in state.mesh.devices.flat]),
        "the pool": repr([(part.shape, part.dtype) for pool in state.pools for part in pool]),
        "kernels": repr((programs.attention, programs.experts, programs.products, programs.sampling)),
        "segments": repr(None if segments is None else (segments.links, segments.buckets)),
        "the drafter": type(state.drafter).__name__,
    }
