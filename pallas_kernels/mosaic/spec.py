"""The shapes that the config of a Hopper kernel is chosen for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

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


def check_dtype(spec: Any) -> None:
    """Raise ValueError if the dtype of activations is not one of the products'."""
    if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise ValueError(f"{spec.dtype=} must be bfloat16 or float16")


def check_smem(config: Any, size: int, spec: Any = None) -> None:
    """Raise ValueError if a block needs more than its shared memory."""
    if size > SMEM:
        wanted = "" if spec is None else f" for {spec}"
        raise ValueError(f"{config} needs {size} bytes of shared memory{wanted}; the limit is {SMEM}")


def check_attention(spec: AttentionShape) -> None:
    """Raise ValueError for pages or dtypes that no attention kernel takes."""
    if spec.page % 8 or not 8 <= spec.page <= 256:
        raise ValueError(f"{spec.page=} must be a multiple of 8 up to 256")
    check_dtype(spec)
    if not spec.quantized and spec.kv_dtype != spec.dtype:
        raise ValueError(f"{spec.kv_dtype=} must be float8_e4m3fn, int8 or {spec.dtype=}")


C = TypeVar("C")  # a kernel's config: block sizes and other choices, with `validate(spec)`


def allowed(configs: Iterable[C], spec: Any) -> Iterator[C]:
    """Yield the distinct configs that can compute the spec."""
    return (config for config in dict.fromkeys(configs) if why_not(config, spec) is None)


def refusal(heuristic: Callable[[Any], Any], *specs: Any) -> str | None:
    """Return None, or the reason why a kernel's heuristic config cannot compute one of the specs."""
    return next((why for spec in specs if (why := why_not(heuristic(spec), spec)) is not None), None)


def why_not(config: Any, spec: Any) -> str | None:
    """Return None, or the reason why a config cannot compute the spec."""
    try:
        config.validate(spec)
    except ValueError as reason:
        return str(reason)
    return None
