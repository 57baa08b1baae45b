"""How the engine processes of a server share KV."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxserve.sched.api.policy import Role

Transport = Literal["auto", "direct", "host"]


class KVShare(NamedTuple):
    """The key that the engine processes have in common, and what this one does."""

    key: bytes
    role: Role = Role.MIXED  # at the start; fronts may set another one
    transport: Transport = "auto"
