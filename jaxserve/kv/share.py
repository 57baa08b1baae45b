"""How the engine processes of a server share KV."""

from __future__ import annotations

import secrets
from typing import Literal, NamedTuple

from jaxserve.config import ServeConfig
from jaxserve.sched.api.policy import Role

Transport = Literal["auto", "direct", "host"]


class KVShare(NamedTuple):
    """The key that the engine processes have in common, and what this one does."""

    key: bytes
    role: Role | None = None  # of the replica at the start, which fronts may change; None: its instances have theirs
    transport: Transport = "auto"

    @classmethod
    def each(cls, config: ServeConfig) -> list[KVShare | None]:
        """Return what each engine of a server gets, with a new key; None: engines exchange no KV."""
        key = secrets.token_bytes(32)
        if config.prefill_replicas is not None:
            return [cls(key, role, config.kv_transfer or "auto") for role in config.replica_roles]
        share = None if config.kv_transfer is None else cls(key, None, config.kv_transfer)
        return [share] * config.most_replicas
