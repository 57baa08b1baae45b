"""An instance on a mesh that spans several processes: one leader, the others follow.

Every process of a mesh must dispatch the same programs in the same order, or collectives deadlock.
The leader has the scheduler and the executor, and sends every dispatch to the followers before it
dispatches itself. Followers dispatch exactly what they receive. When the leader stops after a
segment, all processes have therefore stopped after the same one.

Messages are sent from the dispatching thread, and few are outstanding: the leader submits a step
only after the results of the steps ahead, to which the followers contribute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import Any

import jax

from jaxserve.engine.memory.transfer import Piece
from jaxserve.engine.programs.inputs import Batch, Int32
from jaxserve.engine.programs.segments import Walk
from jaxserve.engine.runtime.device_state import Computed, DeviceState, StepOutputs
from jaxserve.engine.runtime.host_messages import (
    Choose,
    Compute,
    Dispatch,
    End,
    Facts,
    Failed,
    Finish,
    Over,
    Pool,
    Rebuild,
    Remember,
    Score,
    Scrub,
    Segment,
    Start,
    Step,
    decode_from_follower,
    decode_from_leader,
    encode,
)
from jaxserve.sched.api.errors import InvalidValue, JaxserveError
from jaxserve.sched.api.plan import Begin, Span
from jaxserve.structured.token_filter import Words
from jaxserve.wire.blocking import BlockingConnection


class OutOfStep(JaxserveError):
    """The processes of an instance dispatch different programs; all of them must be restarted."""


class _Numbered(Walk):
    """A walk with a number by which followers know it."""

    __slots__ = ("number",)

    def __init__(self, walk: Walk, number: int) -> None:
        super().__init__(walk.batch, walk.links)
        self.number = number


class Leading(DeviceState):
    """The leader's device state, mirrored by its followers. It can neither export nor import pages."""

    def __init__(self, state: DeviceState, followers: Sequence[BlockingConnection]) -> None:
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
        mine = Facts.of(state)
        for follower in followers:
            theirs = decode_from_follower(follower.receive())
            for name in Facts.__struct_fields__:
                here, there = getattr(mine, name), getattr(theirs, name)
                if here != there:
                    raise InvalidValue(f"{name} differs between hosts: {here} on the leader, {there} on a follower")

    def close(self) -> None:
        """Tell the followers to return."""
        for follower in self._followers:
            with suppress(OSError):  # it is gone
                follower.send(encode(Over()))
            follower.close()

    @contextmanager
    def _mirrored(self, dispatch: Dispatch) -> Iterator[None]:
        """Let the followers do what the block does here."""
        if self._lost is not None:
            raise OutOfStep(self._lost)
        try:
            frame = encode(dispatch)
            for follower in self._followers:
                _tell(follower, frame)
            yield
        except BaseException as error:
            self._lost = (
                f"{type(dispatch).__name__} failed ({type(error).__name__}: {error}): end all processes of the instance"
            )
            raise

    def rebuild(self) -> None:
        with self._mirrored(Rebuild()):
            super().rebuild()

    def step(self, batch: Batch, spans: Sequence[Span] = ()) -> tuple[StepOutputs, jax.Array]:
        with self._mirrored(Step(batch, self._follows(spans))):
            return super().step(batch, spans)

    def walk(self, batch: Batch) -> Walk | None:
        walk = super().walk(batch)
        return None if walk is None else _Numbered(walk, next(self._numbers))

    def segment(self, walk: Walk) -> jax.Array:
        assert isinstance(walk, _Numbered)
        with self._mirrored(Segment(walk.number, walk.at, None if walk.at else walk.batch)):
            return super().segment(walk)

    def end(self, walk: Walk, spans: Sequence[Span] = ()) -> tuple[StepOutputs, jax.Array]:
        assert isinstance(walk, _Numbered)
        with self._mirrored(End(walk.number, self._follows(spans))):
            return super().end(walk, spans)

    def compute(self, batch: Batch, forced: Words | None = None) -> Computed:
        with self._mirrored(Compute(batch, forced)):
            return super().compute(batch, forced)

    def finish(self, walk: Walk) -> Computed:
        assert isinstance(walk, _Numbered)
        with self._mirrored(Finish(walk.number)):
            return super().finish(walk)

    def choose(
        self, batch: Batch, spans: Sequence[Span], computed: Computed, rows: Words | None, ahead: Words | None
    ) -> tuple[StepOutputs, jax.Array]:
        with self._mirrored(Choose(self._follows(spans), rows, ahead)):
            return super().choose(batch, spans, computed, rows, ahead)

    def _follows(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Return the spans that followers need: only drafters read them."""
        return () if self.drafter is None else tuple(spans)

    def score(self, hidden: jax.Array, begin: int, targets: Int32) -> list[tuple[Int32, jax.Array]]:
        """Score targets of the step dispatched last."""
        with self._mirrored(Score(begin, targets)):
            return super().score(hidden, begin, targets)

    def pool(self, hidden: jax.Array, parts: Sequence[tuple[int, int]]) -> jax.Array:
        """Sum parts of the step dispatched last."""
        with self._mirrored(Pool(tuple(parts))):
            return super().pool(hidden, parts)

    def remember(self, slot: int, begin: Begin) -> None:
        with self._mirrored(Remember(slot, begin)):
            super().remember(slot, begin)

    def begin(self, slot: int, begin: Begin, start: int) -> None:
        if self.drafter is not None:
            with self._mirrored(Start(slot, begin, start)):
                super().begin(slot, begin, start)

    def scrub(self, pages: Sequence[int], bucket: int) -> None:
        with self._mirrored(Scrub(tuple(pages), bucket)):
            super().scrub(pages, bucket)

    def export(self, pages: Int32) -> Piece:
        raise JaxserveError("an instance that spans hosts cannot export pages: use a mesh of one instance")

    def receive(self, piece: Sequence[Any]) -> Piece:
        if isinstance(piece[0], jax.Array):
            raise JaxserveError("an instance that spans hosts cannot import pages: use a mesh of one instance")
        return super().receive(piece)


def _tell(follower: BlockingConnection, frame: bytes) -> None:
    try:
        if follower.ready():
            raise OutOfStep(decode_from_follower(follower.receive()).why)
        follower.send(frame)
    except OSError as error:
        raise OutOfStep("a follower closed its connection") from error


class Follower:
    """A process that repeats the leader's dispatches. Writer: `follow`."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._walks: dict[int, Walk] = {}  # in progress
        self._hidden: jax.Array | None = None  # of the step dispatched last
        self._computed: tuple[Batch, Computed] | None = None  # a step whose masks are not here yet

    def obey(self, dispatch: Dispatch) -> None:
        if not isinstance(dispatch, Score | Pool):
            self._hidden = None
        match dispatch:
            case Rebuild():
                self._walks.clear()
                self._computed = None
                self._state.rebuild()
            case Step():
                _, self._hidden = self._state.step(dispatch.batch, dispatch.spans)
            case Segment():
                self._segment(dispatch)
            case End():
                _, self._hidden = self._state.end(self._finished(dispatch.walk), dispatch.spans)
            case Compute():
                self._computed = dispatch.batch, self._state.compute(dispatch.batch, dispatch.forced)
            case Finish():
                walk = self._finished(dispatch.walk)
                self._computed = walk.batch, self._state.finish(walk)
            case Choose():
                self._choose(dispatch)
            case Score():
                self._state.score(self._last("a prompt to score"), dispatch.begin, dispatch.targets)
            case Pool():
                self._state.pool(self._last("parts to sum"), dispatch.parts)
            case Remember():
                self._state.remember(dispatch.slot, dispatch.begin)
            case Start():
                self._state.begin(dispatch.slot, dispatch.begin, dispatch.start)
            case Scrub():
                self._state.scrub(dispatch.pages, dispatch.bucket)

    def _segment(self, due: Segment) -> None:
        if due.batch is not None and due.walk not in self._walks:
            begun = self._state.walk(due.batch)
            if begun is not None:
                self._walks[due.walk] = begun
        walk = self._walk(due.walk, f"segment {due.at}")
        if walk.at != due.at or not walk.left:
            following = f"segment {walk.at}" if walk.left else "its end"
            raise OutOfStep(f"received segment {due.at} of walk {due.walk}, but {following} is next here")
        self._state.segment(walk)

    def _finished(self, number: int) -> Walk:
        walk = self._walk(number, "the end")
        if walk.left:
            raise OutOfStep(
                f"received the end of walk {number}, but segment {walk.at} of {len(walk.links)} is next here"
            )
        return self._walks.pop(number)

    def _walk(self, number: int, what: str) -> Walk:
        if number not in self._walks:
            raise OutOfStep(f"received {what} of walk {number}; in progress here are {sorted(self._walks)}")
        return self._walks[number]

    def _choose(self, choice: Choose) -> None:
        if self._computed is None:
            raise OutOfStep("received the masks of a step that was not computed here")
        batch, computed = self._computed
        self._computed = None
        _, self._hidden = self._state.choose(batch, choice.spans, computed, choice.rows, choice.ahead)

    def _last(self, what: str) -> jax.Array:
        """Return the hidden states of the step dispatched last."""
        if self._hidden is None:
            raise OutOfStep(f"received {what}, but the last dispatch was not a step")
        return self._hidden


def follow(state: DeviceState, leader: BlockingConnection) -> None:
    """Dispatch what the leader dispatches, on a warm state, until the leader closes.

    Raises OutOfStep if a message does not fit the state here or the leader is gone. The leader learns
    of every exception before its next dispatch.
    """
    follower = Follower(state)
    with closing(leader):
        leader.send(encode(Facts.of(state)))
        try:
            while not isinstance(dispatch := _heard(leader), Over):
                follower.obey(dispatch)
        except Exception as error:
            with suppress(OSError):
                leader.send(encode(Failed(f"process {jax.process_index()}: {type(error).__name__}: {error}")))
            raise


def _heard(leader: BlockingConnection) -> Dispatch | Over:
    try:
        frame = leader.receive()
    except OSError as error:
        raise OutOfStep("the leader closed its connection: end all processes of the instance") from error
    message: Dispatch | Over = decode_from_leader(frame)
    return message
