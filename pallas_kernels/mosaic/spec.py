"""What a kernel for Hopper is chosen for: the shapes of one step on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        """Of the products: float16 where pools are of 8 bits, which take the fewest instructions to become that."""
        return jnp.float16 if self.quantised else self.dtype

    @property
    def quantised(self) -> bool:
        return bool(jnp.dtype(self.kv_dtype).itemsize == 1)


S = TypeVar("S", contravariant=True)


class Config(Protocol[S]):
    """Block sizes and the like of one kernel."""

    def validate(self, spec: S) -> None:
        """Raises ValueError, with the reason, where it cannot compute the spec."""


T = TypeVar("T")
C = TypeVar("C", bound=Config[Any])


def allowed(configs: Iterable[C], spec: Any) -> Iterator[C]:
    """Those that can compute the spec, each once."""
    return (config for config in dict.fromkeys(configs) if _why_not(config, spec) is None)


def refusal(heuristic: Callable[[T], Config[T]], *specs: T) -> str | None:
    """None, or why a kernel's heuristic config cannot compute one of the specs."""
    return next((why for spec in specs if (why := _why_not(heuristic(spec), spec)) is not None), None)


def _why_not(config: Config[T], spec: T) -> str | None:
    try:
        config.validate(spec)
    except ValueError as reason:
        return str(reason)
    return None
