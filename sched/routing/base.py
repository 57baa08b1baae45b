"""The interface of routers, which choose the instances for the prefill and the decode of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..api.instance_view import InstanceView
from ..api.perf import Array
from ..api.policy import MIXED_SHARE, Role
from ..api.request import Request


class Fleet(NamedTuple):
    """All instances of a cluster, read-only."""

    now: float
    instances: Sequence[InstanceView]
    transfer: Callable[[int], float]  # predicted seconds to move the KV of this many tokens
    shows_sent: bool = False  # the instances show all that the router sent, even if they are snapshots from before

    @property
    def entries(self) -> list[int]:
        """Indices of the instances that prefill new prompts and accept requests."""
        return [
            index
            for index, instance in enumerate(self.instances)
            if instance.role is not Role.DECODE and instance.accepting
        ]

    @property
    def decoders(self) -> list[int]:
        """Indices of the decode instances that accept requests."""
        return [
            index
            for index, instance in enumerate(self.instances)
            if instance.role is Role.DECODE and instance.accepting
        ]


class Scalars(NamedTuple):
    """Numbers of many instances that a new prompt may go to: columns for estimates."""

    begun: Array  # seconds until the submitted steps end
    backlog: Array  # prompt tokens to compute
    rate: Array  # prompt tokens per second
    busy: Array  # share of the time that decodes take
    running: Array  # requests that hold a slot
    waiting: Array  # the others
    context: Array  # total context of the running decodes, in tokens
    hits: Array  # tokens of this prompt in the prefix cache


class Move(NamedTuple):
    """A waiting request, with no tokens computed, that should wait on another instance."""

    request: int
    source: int
    target: int
    ends: float = float("inf")  # predicted time of the first token there; inf if there is no prediction


class Router(Protocol):
    """A routing strategy. Instances are indices into `fleet.instances`, in order of preference."""

    writes_back: bool = False  # copy the KV of the answer back to the instance that computed the prompt
    deflects: bool = False  # may choose a decode instance for a prompt
    mixed_share: float = MIXED_SHARE  # the instances' `Limits.mixed_share`

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        """Rank the instances for the prefill of a request.

        If the first one is a decode instance, the request also decodes there (deflection).
        """

    def estimate(self, request: Request, scalars: Scalars) -> Array | None:
        """Return an estimate of what `prefill` ranks by, least first: of a large fleet it sees the best only.

        None if it looks at few instances anyway. By default the seconds until the prompts there and
        this one are computed.
        """
        tokens = scalars.backlog + np.maximum(request.remaining - scalars.hits, 1.0)
        seconds: Array = scalars.begun + tokens / (scalars.rate * (1.0 - scalars.busy))
        return seconds

    def decode(self, request: Request, fleet: Fleet) -> list[int]:
        """Rank the instances for the decode of a prompt from a prefill instance: least total context first."""
        instances = fleet.instances
        return sorted(fleet.decoders, key=lambda index: (instances[index].decode_context, index))

    def decode_in_place(self, request: Request, index: int, fleet: Fleet) -> bool:
        """Return whether a request decodes on instance `index`, which computed its prompt, for now.

        Called if no decode instance has room. The request moves as soon as one has.
        """
        return False

    def decode_priority(self, request: Request, fleet: Fleet) -> float:
        """Return the rank of a request among those that wait for room to decode: lowest first, ties by arrival.

        Requests that can decode in place come last, as they need the room least. Best effort comes
        after all others whatever the rank.
        """
        return float(request.decodes_in_place)

    def predicted_first_token(self, request: Request) -> float | None:
        """Return the predicted time of the first token of the last placed request, or None if unknown."""
        return None

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        """Return the waiting requests to move to another instance. Called after every arrival and step."""
        return ()

    def roles(self, fleet: Fleet) -> Mapping[int, Role]:
        """Return role changes, by instance. Called after every arrival and step, before `redirect`."""
        return {}
