"""The interface of routers, which choose the instances for the prefill and the decode of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..api.instance_view import InstanceView
from ..api.policy import Role
from ..api.request import Request


class Fleet(NamedTuple):
    """All instances of a cluster, read-only."""

    now: float
    instances: Sequence[InstanceView]
    transfer: Callable[[int], float]  # predicted seconds to move the KV of this many tokens

    @property
    def entries(self) -> list[int]:
        """Indices of the instances that prefill new prompts and accept requests."""
        return [index for index, one in enumerate(self.instances) if one.role is not Role.DECODE and one.accepting]

    @property
    def decoders(self) -> list[int]:
        """Indices of the decode instances that accept requests."""
        return [index for index, one in enumerate(self.instances) if one.role is Role.DECODE and one.accepting]


class Move(NamedTuple):
    """A waiting request, with no tokens computed, that should wait on another instance."""

    request: int
    source: int
    target: int
    ends: float = float("inf")  # predicted time of the first token there; inf if there is no prediction


class Router(Protocol):
    """A routing strategy. Instances are indices into `fleet.instances`, in order of preference."""

    writes_back: bool = False  # copy the KV of the answer back to the instance that computed the prompt

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        """Rank the instances for the prefill of a request.

        If the first one is a decode instance, the request also decodes there (deflection).
        """

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
