"""The shapes that the config of a Hopper kernel is chosen for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp

CORES = 132  # streaming multiprocessors of an H100 or H200 SXM
SMEM = 232_448  # bytes of shared memory available to a block


@dataclass(frozen=True)
class AttentionShape:
    """The shapes of one step on one device; letters as in layout.py, H and K per shard."""

    rows: int  # S
    heads: int  # H
    kv_heads: int  # K
    dim: int  # D
    page: int  # B
    queries: int = 1  # maximum query tokens of a row
    dtype: Any = jnp.bfloat16
    kv_dtype: Any = jnp.bfloat16
    cores: int = CORES
    values: int = 0  # R, columns of a latent that are its values; 0: values have their own pool

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype"):  # equal to specs of the same dtypes in another form
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)))

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def compute_dtype(self) -> Any:
        """The dtype of the products: float16 for 8-bit pools, as widening to it takes the fewest instructions."""
        return jnp.dtype(jnp.float16) if self.quantized else self.dtype

    @property
    def quantized(self) -> bool:
        return bool(self.kv_dtype.itemsize == 1)

    def check_scales(self, scales: Any) -> None:
        """Raise ValueError if 8-bit pools come without scales, or others with them."""
        if self.quantized != (scales is not None):
            raise ValueError(
                f"pools of {self.kv_dtype} and {scales=} do not match: 8-bit pools need scales, others take none"
            )


S = TypeVar("S", contravariant=True)


class Config(Protocol[S]):
    """The block sizes and other choices of one kernel."""

    def validate(self, spec: S) -> None:
        """Raise ValueError, with the reason, if this config cannot compute the spec."""


T = TypeVar("T")
C = TypeVar("C", bound=Config[Any])


def allowed(configs: Iterable[C], spec: Any) -> Iterator[C]:
    """Yield the distinct configs that can compute the spec."""
    return (config for config in dict.fromkeys(configs) if _why_not(config, spec) is None)


def refusal(heuristic: Callable[[T], Config[T]], *specs: T) -> str | None:
    """Return None, or the reason why a kernel's heuristic config cannot compute one of the specs."""
    return next((why for spec in specs if (why := _why_not(heuristic(spec), spec)) is not None), None)


def _why_not(config: Config[T], spec: T) -> str | None:
    try:
        config.validate(spec)
    except ValueError as reason:
        return str(reason)
    return None
