"""The messages between the processes of an instance that spans hosts: dispatches, with their arrays."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import jax
import msgspec
import numpy as np

from jaxserve.engine.programs.inputs import Batch, Int32
from jaxserve.engine.runtime.device_state import DeviceState
from jaxserve.sched.api.plan import Begin, Span
from jaxserve.structured.token_filter import Words
from jaxserve.wire.connection import Message

# from a follower


class Facts(Message, frozen=True):
    """What must be equal in all processes, so that they dispatch the same programs. The first message."""

    jax: str
    model: str
    limits: str  # of a step
    mesh: str
    pool: str
    kernels: str
    segments: str
    drafter: str

    @classmethod
    def of(cls, state: DeviceState) -> Facts:
        programs, segments = state.programs, state.segments
        return cls(
            jax.__version__,
            repr(programs.spec),
            repr(programs.limits),
            repr([device.id for device in state.mesh.devices.flat]),
            repr([(part.shape, part.dtype) for pool in state.pools for part in pool]),
            repr((programs.attention, programs.experts, programs.products, programs.sampling)),
            repr(None if segments is None else (segments.links, segments.buckets)),
            type(state.drafter).__name__,
        )


class Failed(Message, frozen=True):
    """Why a follower has ended."""

    why: str


# from the leader: each but Over is one call of a method of DeviceState


class Rebuild(Message, frozen=True):
    pass


class Step(Message, frozen=True):
    batch: Batch
    spans: tuple[Span, ...]


class Segment(Message, frozen=True):
    walk: int  # its number
    at: int
    batch: Batch | None  # with the first segment


class End(Message, frozen=True):
    walk: int
    spans: tuple[Span, ...]


class Compute(Message, frozen=True):
    batch: Batch
    forced: Words | None


class Finish(Message, frozen=True):
    walk: int


class Choose(Message, frozen=True):
    spans: tuple[Span, ...]
    rows: Words | None
    ahead: Words | None


class Score(Message, frozen=True):
    begin: int
    targets: Int32


class Pool(Message, frozen=True):
    parts: tuple[tuple[int, int], ...]


class Remember(Message, frozen=True):
    slot: int
    begin: Begin


class Start(Message, frozen=True):
    """The call of `begin`."""

    slot: int
    begin: Begin
    start: int


class Scrub(Message, frozen=True):
    pages: tuple[int, ...]
    bucket: int


class Over(Message, frozen=True):
    """The leader has closed."""


Dispatch = Rebuild | Step | Segment | End | Compute | Finish | Choose | Score | Pool | Remember | Start | Scrub


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"no encoder for {type(value)}")


def _as_array(kind: Any, value: Any) -> Any:
    if get_origin(kind) is not np.ndarray:
        raise NotImplementedError(f"no decoder for {kind}")
    given, shape, content = value
    (wanted,) = get_args(get_args(kind)[1])
    if np.dtype(given) != np.dtype(wanted):
        raise ValueError(f"an array of {given} where {np.dtype(wanted).str} is expected")
    return np.frombuffer(content, wanted).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_array).encode
decode_from_leader = msgspec.msgpack.Decoder(Dispatch | Over, dec_hook=_as_array).decode
decode_from_follower = msgspec.msgpack.Decoder(Facts | Failed).decode
