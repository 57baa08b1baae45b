"""The messages between a front (HTTP, tokenizing) and an engine in another process.

A request has the id that its front gave it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from jaxserve.engine.runtime.flight_recorder import Recent, RequestLife
from jaxserve.engine.runtime.info import EngineInfo, Stats
from jaxserve.fleet.reports import InstanceReport
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.errors import InvalidValue, JaxserveError, QueueFull, Unavailable
from jaxserve.sched.api.new_request import NewRequest, Progress
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.instance.stats import Sizes
from jaxserve.sched.scaling.base import Arriving
from jaxserve.wire.connection import Message

# from the front


class Submit(Message, frozen=True):
    """The arguments of `Engine.submit`."""

    id: int
    request: NewRequest


class Repeat(Message, frozen=True):
    """A Submit that differs from the last one of its front in these fields only, such as another output of a prompt."""

    id: int
    key: str
    seed: int | None
    prompt_logprobs: int | None
    waited: float
    progress: Progress | None = None
    handed_over: bool = False
    kv_from: str = ""
    kv_tokens: int = 0

    @classmethod
    def of(cls, last: NewRequest | None, id: int, request: NewRequest) -> Repeat | None:
        """Return the shorter form of a request, if it has one after `last`."""
        if last is None or request.prompt is not last.prompt:
            return None
        p = request.params
        repeat = cls(id, request.key, p.seed, p.prompt_logprobs, *(getattr(request, name) for name in _OWN))
        return repeat if repeat.request(last) == request else None

    def request(self, last: NewRequest) -> NewRequest:
        params = last.params.of_output(self.seed, self.prompt_logprobs)
        return replace(last, params=params, key=self.key, **{name: getattr(self, name) for name in _OWN})


_OWN = ("waited", "progress", "handed_over", "kv_from", "kv_tokens")


class Prefetch(Message, frozen=True):
    """Fetch the KV of a prompt that another engine computes, since its request will come here."""

    prompt: tuple[int, ...]
    salt: bytes
    kv_from: str


class Cancel(Message, frozen=True):
    """End a request early."""

    id: int
    reason: str


class GetStats(Message, frozen=True):
    """Ask for a State of now."""

    call: int


class GetRecent(Message, frozen=True):
    """Ask for a RecentAnswer: events and ended requests since a number."""

    call: int
    since: int


class GetLife(Message, frozen=True):
    """Ask for a LifeAnswer: what is known of a request by its number at the engine, if it is of the client."""

    call: int
    request: int
    client: str | None


class SetRoles(Message, frozen=True):
    """Ask to set the roles of instances."""

    call: int
    roles: dict[int, Role]


class Follow(Message, frozen=True):
    """Ask for Reports from now on."""


class ResetPrefixCache(Message, frozen=True):
    """Ask to empty the prefix cache."""

    call: int


class EndSession(Message, frozen=True):
    """Ask to release the pages of a session."""

    call: int
    session: str


class Profile(Message, frozen=True):
    """Ask to start or to end a trace of the engine's process."""

    call: int
    on: bool


class Restart(Message, frozen=True):
    """Ask an engine to take no more requests, to finish those that it has, and to end.

    Its supervisor starts it again if that many replicas are still wanted.
    """

    patience: float  # seconds to finish


class Stay(Message, frozen=True):
    """Ask an engine to take requests again after a Restart. If it has finished its requests, it ends anyway."""


# from the engine


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A JaxserveError."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: JaxserveError) -> Failure:
        kind = next(ancestor for ancestor in type(error).__mro__ if ancestor.__name__ in KINDS)
        return cls(kind.__name__, str(error), getattr(error, "param", None), getattr(error, "retry_after", None))

    def error(self) -> JaxserveError:
        kind: Any = KINDS[self.kind]
        if kind is InvalidValue:
            return InvalidValue(self.message, self.param)
        error: JaxserveError = kind(
            *(argument for argument in (self.message, self.retry_after) if argument is not None)
        )
        return error


KINDS: dict[str, type[JaxserveError]] = {
    kind.__name__: kind for kind in (InvalidValue, QueueFull, Unavailable, JaxserveError)
}


class State(Message, frozen=True):
    """What changes while an engine runs; sent every SHARING seconds, and in answer to GetStats."""

    stats: Stats
    ailment: str | None
    call: int | None = None  # of the GetStats that asked
    leaving: bool = False  # since a Restart
    arriving: Arriving = Arriving()  # requests of all fronts


class Hello(Message, frozen=True):
    """The first message of an engine."""

    version: str
    info: EngineInfo
    queue: int | None  # requests that may wait for each instance that takes prompts; None: unbounded
    state: State
    limits: tuple[Limits, ...]  # of the instances
    reports: tuple[InstanceReport, ...]  # of all instances, without prefix caches
    kv: str = ""  # where other engines get KV of this one; "": nowhere


class Report(Message, frozen=True):
    """What has changed on instances; sent at most every REPORTING seconds to fronts that Follow."""

    mark: int  # the last request of this front that the instances show, or that has ended
    instances: tuple[InstanceReport, ...]


class Outputs(Message, frozen=True):
    """What a step, or an end, gave to requests of this front, and the times of those that ended."""

    deltas: tuple[Delta, ...]
    ended: dict[int, RequestMetrics]


class Refused(Message, frozen=True):
    """A request that the engine did not accept."""

    id: int
    failure: Failure


class Answer(Message, frozen=True):
    """The result of SetRoles, ResetPrefixCache, EndSession or Profile."""

    call: int
    value: bool = True
    failure: Failure | None = None


class RecentAnswer(Message, frozen=True):
    """The result of GetRecent."""

    call: int
    value: Recent


class LifeAnswer(Message, frozen=True):
    """The result of GetLife."""

    call: int
    value: RequestLife | None


FromFront = (
    Submit
    | Repeat
    | Prefetch
    | Cancel
    | GetStats
    | GetRecent
    | GetLife
    | SetRoles
    | ResetPrefixCache
    | EndSession
    | Profile
    | Follow
    | Restart
    | Stay
)
FromEngine = Hello | State | Report | Outputs | Refused | Answer | RecentAnswer | LifeAnswer


def _own_types(kind: type, value: Any) -> Any:
    if kind is Sizes:
        return Sizes(value)
    raise NotImplementedError(f"no decoder for {kind}")


decode_from_front = msgspec.msgpack.Decoder(FromFront).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_own_types).decode
