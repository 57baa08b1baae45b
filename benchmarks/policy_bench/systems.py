"""The compared models, and policies with the roles of their instances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.sched import policies


@dataclass(frozen=True)
class Model:
    """A served model.

    chunk: tokens of a full step. times: factor on `--requests`. config: changes to the demo model's config.json for a
    model with random weights; None is the demo model itself.
    """

    length: int
    chunk: int
    rows: int = 32
    times: float = 1.0
    config: dict[str, Any] | None = None


MODELS = {
    "llama": Model(
        1024, 256,
        config={
            "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 12,
            "num_key_value_heads": 4, "head_dim": 64,
        },
    ),
    "demo": Model(2048, 512, times=2.0),
}  # fmt: skip


@dataclass(frozen=True)
class System:
    """A policy and the roles of its instances: all mixed, or split into prefill and decode."""

    policy: str
    mixed: bool

    @classmethod
    def parse(cls, text: str) -> System:
        """Parse `NAME` (with the roles of its paper), `NAME@mixed` or `NAME@split`. Raises InvalidValue."""
        name, at, roles = text.partition("@")
        policies.make(name)
        if at and roles not in ("mixed", "split"):
            raise InvalidValue(f"{text!r} must be NAME, NAME@mixed or NAME@split", "policies")
        bare = name.partition(":")[0]
        return cls(name, roles == "mixed" if at else bare in policies.WHOLE and bare not in policies.ROUTER)

    @property
    def mode(self) -> str:
        return "colocated" if self.mixed else "auto"
