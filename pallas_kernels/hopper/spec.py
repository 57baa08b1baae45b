"""What a kernel for Hopper is chosen for: the shapes of one step on one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp

CORES = 132  # of an H100 or H200, SXM
SMEM = 232_448  # bytes of shared memory that a block may have


@dataclass(frozen=True)
class Spec:
    """Letters as in layout.py. H and K are those of one shard."""

    rows: int  # S
    heads: int  # H
    kv_heads: int  # K
    dim: int  # D
    page: int  # B
    queries: int = 1  # most query tokens of a row
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    cores: int = CORES
    values: int = 0  # R, columns of a latent that are values; 0: values have a pool of their own

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def compute_dtype(self) -> Any:
        """Of the products: float16 where the pools are float8, which the hardware widens to no other type."""
        return jnp.float16 if jnp.dtype(self.kv_dtype) == jnp.float8_e4m3fn else self.dtype

    @property
    def quantised(self) -> bool:
        return bool(jnp.dtype(self.kv_dtype).itemsize == 1)


class Config(Protocol):
    """Block sizes and the like of one kernel."""

    def validate(self, spec: Spec) -> None:
        """Raises ValueError, with the reason, where it cannot compute the spec."""


C = TypeVar("C", bound=Config)


def allowed(configs: Iterable[C], spec: Spec) -> Iterator[C]:
    """Those that can compute the spec, each once."""
    for config in dict.fromkeys(configs):
        try:
            config.validate(spec)
        except ValueError:
            continue
        yield config
