"""One instance on a mesh that spans processes, as several hosts have them: one of them leads, the others follow.

Every process of a mesh must dispatch the same programs in the same order, or collectives wait for each other for ever.
The leader has the scheduler and the executor. What it dispatches it first sends, in order; a follower dispatches that,
and nothing that it was not sent. So where the leader stops a chain of segments all have stopped: the index of the last
segment sent is the counter that they agree on.

Messages are pickled, between processes of one job that share a key: never take a connection from anybody else. They
are sent from the thread that dispatches, and are few at a time: a step is not submitted before results of the ones
ahead of it are back, to which followers contribute.
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
from jaxserve.engine.runtime.device_state import DeviceState, StepOutputs
from jaxserve.sched.api.errors import InvalidValue, JaxserveError
from jaxserve.sched.api.plan import Begin, Span

Address = tuple[str, int]
Message = tuple[Any, ...]  # a method of `Follower`, and its arguments


class OutOfStep(JaxserveError):
    """The processes of an instance no longer dispatch the same. It does not heal: end all of them and start again."""


class _Numbered(Walk):
    """A walk that followers know by its number."""

    __slots__ = ("number",)

    def __init__(self, walk: Walk, number: int) -> None:
        super().__init__(walk.batch, walk.total)
        self.number = number


class Leading(DeviceState):
    """The leader's state: followers dispatch what it dispatches. Pages cannot leave it or come to it."""

    def __init__(self, state: DeviceState, followers: Sequence[Connection[Any, Any]]) -> None:
        """Takes over what `state` holds, which is warm and not used from now on. `followers`: one connection to each
        other process of the mesh. Raises InvalidValue where they are too few, or what they hold is not the same."""
        vars(self).update(vars(state))
        self._followers = tuple(followers)
        self._numbers = count(1)
        self._lost: str | None = None
        processes = len({device.process_index for device in self.mesh.devices.flat})
        if len(followers) != processes - 1:
            raise InvalidValue(f"{len(followers)} followers for a mesh over {processes} processes: all but one follow")
        mine = _facts(state)
        for follower in followers:
            for name, theirs in follower.recv().items():
                if theirs != mine[name]:
                    raise InvalidValue(f"{name} differs between hosts: {mine[name]} leads, {theirs} would follow")

    def close(self) -> None:
        """Let the followers return."""
        for follower in self._followers:
            with suppress(OSError):  # it is gone
                follower.send(None)
            follower.close()

    @contextmanager
    def _told(self, *message: Any) -> Iterator[None]:
        """Followers are told to do what the block does here."""
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

    def _follows(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Only drafters read them."""
        return () if self.drafter is None else spans

    def score(self, hidden: jax.Array, begin: int, targets: Int32) -> list[tuple[Int32, jax.Array]]:
        """Of the step dispatched last."""
        with self._told("score", begin, targets):
            return super().score(hidden, begin, targets)

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
        raise JaxserveError("pages of an instance that spans hosts do not move: serve it with one instance")

    def receive(self, piece: Sequence[Any]) -> Piece:
        if isinstance(piece[0], jax.Array):
            raise JaxserveError("pages do not move to an instance that spans hosts: serve it with one instance")
        return super().receive(piece)


def _tell(follower: Connection[Any, Any], message: Message) -> None:
    try:
        if follower.poll():
            raise OutOfStep(follower.recv())
        follower.send(message)
    except (EOFError, OSError) as error:
        raise OutOfStep("a follower has gone without a word") from error


class Follower:
    """Does what the leader did, each method one of its messages. Writer: `follow`."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._walks: dict[int, Walk] = {}  # begun and not ended
        self._hidden: jax.Array | None = None  # of the step dispatched last

    def obey(self, message: Message) -> None:
        what, *args = message
        if what != "score":
            self._hidden = None
        getattr(self, what)(*args)

    def rebuild(self) -> None:
        self._walks.clear()
        self._state.rebuild()

    def step(self, batch: Batch, spans: Sequence[Span]) -> None:
        _, self._hidden = self._state.step(batch, spans)

    def segment(self, number: int, at: int, batch: Batch | None) -> None:
        if batch is not None and number not in self._walks and (begun := self._state.walk(batch)) is not None:
            self._walks[number] = begun
        walk = self._found(number, f"segment {at}")
        if walk.at != at or not walk.left:
            due = f"segment {walk.at}" if walk.left else "its end"
            raise OutOfStep(f"told to dispatch segment {at} of walk {number}, of which {due} is next here")
        self._state.segment(walk)

    def end(self, number: int, spans: Sequence[Span]) -> None:
        walk = self._found(number, "the end")
        if walk.left:
            raise OutOfStep(f"told to end walk {number}, of which segment {walk.at} of {walk.total} is next here")
        _, self._hidden = self._state.end(self._walks.pop(number), spans)

    def _found(self, number: int, what: str) -> Walk:
        if number not in self._walks:
            raise OutOfStep(f"told to dispatch {what} of walk {number}; under way here are {sorted(self._walks)}")
        return self._walks[number]

    def score(self, begin: int, targets: Int32) -> None:
        if self._hidden is None:
            raise OutOfStep("told to score a prompt, and what was dispatched last is not a step")
        self._state.score(self._hidden, begin, targets)

    def remember(self, slot: int, begin: Begin) -> None:
        self._state.remember(slot, begin)

    def begin(self, slot: int, begin: Begin, start: int) -> None:
        self._state.begin(slot, begin, start)

    def scrub(self, pages: Sequence[int], bucket: int) -> None:
        self._state.scrub(pages, bucket)


def follow(state: DeviceState, leader: Connection[Any, Any]) -> None:
    """Dispatch what the leader dispatches, on a state that is warm, until it closes.

    Raises OutOfStep where it is told what cannot be next, or the leader is gone; whatever is raised, the leader learns
    of it before it dispatches again.
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
    """The next message; None: there are no more."""
    try:
        message: Message | None = leader.recv()
    except (EOFError, OSError) as error:
        raise OutOfStep("the leader has gone without a word: end all processes of the instance") from error
    return message


def accept(listener: Listener, followers: int) -> list[Connection[Any, Any]]:
    """Connections of that many followers."""
    return [_prompt(listener.accept()) for _ in range(followers)]


def connect(leader: Address, key: bytes) -> Connection[Any, Any]:
    """A follower's connection to a leader that listens with the same key."""
    return _prompt(Client(leader, authkey=key))


def _prompt(connection: Connection[Any, Any]) -> Connection[Any, Any]:
    """Without the wait, up to 40 ms, for small messages to become a large one."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _facts(state: DeviceState) -> dict[str, str]:
    """What all processes of an instance must have the same, or they would dispatch other programs."""
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
