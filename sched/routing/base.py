"""What a router is: it picks the instances on which a request prefills and decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..api.instance_view import InstanceView
from ..api.policy import Role
from ..api.request import Request


class Fleet(NamedTuple):
    """All instances of a cluster, to be read, not written."""

    now: float
    instances: Sequence[InstanceView]
    transfer: Callable[[int], float]  # predicted seconds to move the KV of so many tokens

    @property
    def entries(self) -> list[int]:
        """Indices of the instances that prompts come to; an instance whose step hangs takes none."""
        return [index for index, one in enumerate(self.instances) if one.role is not Role.DECODE and not one.hung]

    @property
    def decoders(self) -> list[int]:
        """Indices of the instances that prompts computed elsewhere decode on."""
        return [index for index, one in enumerate(self.instances) if one.role is Role.DECODE and not one.hung]


class Move(NamedTuple):
    """A request that waits on one instance, none of it computed, and had better wait on another."""

    request: int
    source: int
    target: int
    ends: float = float("inf")  # when its first token is predicted to come out there; inf where nobody says


class Router(Protocol):
    """Orders instances for a request, best first, as indices into `fleet.instances`."""

    writes_back: bool = False  # what decoding added to a request's KV is copied to where its prompt was computed

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        """Instances that may compute its prompt. Where that is a decode instance it decodes there too (deflection)."""

    def decode(self, request: Request, fleet: Fleet) -> list[int]:
        """Instances that may decode what a prefill instance computes: those with the least context first."""
        instances = fleet.instances
        return sorted(fleet.decoders, key=lambda index: (instances[index].decode_context, index))

    def decode_in_place(self, request: Request, index: int, fleet: Fleet) -> bool:
        """Asked where no instance has room to decode a request whose prompt instance `index` has computed: whether it
        decodes there until one has."""
        return False

    def decode_priority(self, request: Request, fleet: Fleet) -> float:
        """Among requests that wait for room to decode, best effort aside, the least goes first, and equals go first
        come first: those last that can decode where they are."""
        return float(request.decodes_in_place)

    def predicted_first_token(self, request: Request) -> float | None:
        """When the first token of the request placed last is predicted to come out; None where nobody says."""
        return None

    def redirect(self, fleet: Fleet) -> Sequence[Move]:
        """Asked after every arrival and every step: who should wait elsewhere."""
        return ()

    def roles(self, fleet: Fleet) -> Mapping[int, Role]:
        """Asked as often, before that: which instances should be for something else from now on, and for what."""
        return {}
