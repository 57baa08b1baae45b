"""Compile-gate cases of the KV write for Hopper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.norms import HeadNorms
from pallas_kernels.ops.kv_write.hopper import rope_and_write

TUPLE = 64  # bytes: the addresses of the results
MODELS = {"8b": (32, 8, 128), "8b tp4": (8, 2, 128), "70b tp8": (8, 1, 128), "qwen 7b": (28, 4, 128)}  # H, K, D


def cases() -> list[Case]:
    """Return every config in use: decode and prefill steps, dtypes and head dims of served models."""
    bf16 = jnp.bfloat16
    writes = [_case(name, 256, *shape, bf16, bf16) for name, shape in MODELS.items()]
    writes += [_case("8b", 8192, *MODELS["8b"], bf16, bf16), _case("8b", 1, *MODELS["8b"], bf16, bf16)]
    writes += [_case(f"d{dim}", 256, 16, 4, dim, bf16, bf16) for dim in (64, 256)]
    writes.append(_case("8b", 256, *MODELS["8b"], jnp.float16, jnp.float16))
    writes += [_case("8b", 256, *MODELS["8b"], bf16, stored) for stored in (jnp.float8_e4m3fn, jnp.int8)]
    writes += [_case(name, 256, *MODELS[name], jnp.float16, jnp.float8_e4m3fn) for name in ("8b tp4", "70b tp8")]
    normed = {"qwen3": (16, 8, 128), "qwen3-moe tp4": (8, 1, 128), "gemma3": (4, 1, 256)}
    return writes + [_case(name, 256, *shape, bf16, bf16, normed=True) for name, shape in normed.items()]


def _case(
    name: str, tokens: int, heads: int, kv_heads: int, dim: int, dtype: Any, stored: Any, normed: bool = False
) -> Case:
    pool, half = ((4096, 64, kv_heads, dim), stored), ((tokens, 1, dim // 2), jnp.float32)
    scales = [((kv_heads,), jnp.float32)] * 2 if stored != dtype else []
    qkv = (tokens, kv_heads, (heads // kv_heads + 2) * dim), dtype
    arguments = shapes(qkv, half, half, pool, pool, ((tokens,), jnp.int32), *scales)
    kinds = jnp.dtype(dtype).name + ("" if stored == dtype else f" {jnp.dtype(stored).name}") + " normed" * normed
    program: Any = _step
    if normed:
        arguments, program = (*arguments, *shapes(((dim,), dtype), ((dim,), dtype))), _normed_step
    return Case(f"kv_write {name} {kinds} t{tokens}", program, arguments, donate=(3, 4), scratch=TUPLE)


def _normed_step(*arguments: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    *rest, q, k = arguments
    return _step(*rest, norms=HeadNorms(q, k, 1e-6, 1.0))


def _step(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, *rest: jax.Array, norms: HeadNorms | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    k_pool, v_pool, write, *scales = rest
    unused = jnp.zeros(1, jnp.int32)
    ragged = Ragged(unused, unused, write, unused, unused, unused, unused[None])
    options: dict[str, Any] = {"scales": Scales(*scales) if scales else None, "norms": norms}
    return rope_and_write(qkv, (cos, sin), k_pool, v_pool, ragged, **options)
