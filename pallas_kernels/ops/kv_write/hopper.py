"""Rotate queries and keys, and write keys and values to their pages, in one kernel and in place.

    q[t] = rotate(q[t])
    k_pool[write[t]] = rotate(k[t]),  v_pool[write[t]] = v[t]      each / its scale[k] if pools are quantized

A block takes `tokens` tokens. Its 128 threads load whole rows of heads straight into registers, 16
bytes each if the shape allows, rotate them and store them. Nothing is shared, so there is no shared
memory, and several blocks per multiprocessor hide each other's latency. Padding tokens (`write` out
of range) rotate their queries and store nothing. The numbers are those of `rope_and_write_xla`
(xla.py): rotated in float32, rounded to the dtype of k, then divided, clipped to the largest value
and rounded. q and both pools alias the results if they are donated.

Head dims other than 64, 128 and 256 and dtypes other than bfloat16 and float16 are refused.

Floor: q, k and v read and written once, over the bandwidth: 47 us for 8192 tokens of Llama-3-8B; at
decode, the launch.

Letters: T tokens, N pages in the pool, B page size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.interpret import Interpret, cast
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.kv_write.xla import LARGEST
from pallas_kernels.rope import Turn

FEW = 2048  # up to this many tokens, one token per block keeps the device busy


@dataclass(frozen=True)
class Config:
    """The number of tokens that one block rotates and stores, one after the other."""

    tokens: int = 1

    def validate(self, spec: AttentionShape) -> None:
        if not 1 <= self.tokens <= 16:
            raise ValueError(f"{self.tokens=} must be 1 to 16")
        if spec.dim not in (64, 128, 256):
            raise ValueError(f"{spec.dim=} must be 64, 128 or 256")
        if jnp.dtype(spec.dtype) not in (jnp.bfloat16, jnp.float16):
            raise ValueError(f"{spec.dtype=} must be bfloat16 or float16")
        if spec.quantized and jnp.dtype(spec.kv_dtype).name not in LARGEST:
            raise ValueError(f"{spec.kv_dtype=} must be one of {', '.join(LARGEST)}, or the dtype of the keys")

    def smem_bytes(self) -> int:
        return 0


def heuristic(tokens: int) -> Config:
    """Return a config for a step of `tokens` tokens."""
    return Config(1 if tokens <= FEW else 4)


def candidates(tokens: int) -> Iterator[Config]:
    """Yield configs worth timing."""
    for few in (1, 2, 4, 8):
        if few <= tokens:
            yield Config(few)


def rope_and_write(
    q: jax.Array,  # [T, H, D]
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    turn: Turn | None,  # cos, sin [T, 1, D / 2] float32
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    *,
    scales: Scales | None = None,
    config: Config | None = None,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rotated queries, and the pools with this step's keys and values; padding tokens are dropped."""
    tokens, heads, dim = q.shape
    pages, page, kv_heads, _ = k_pool.shape
    config = config or heuristic(tokens)
    config.validate(AttentionShape(1, heads, kv_heads, dim, page, dtype=q.dtype, kv_dtype=k_pool.dtype))
    if (scales is None) != (k_pool.dtype == k.dtype):
        raise ValueError(f"pools of {k_pool.dtype} and keys of {k.dtype} need {'no ' * (scales is not None)}scales")
    several = next(n for n in range(config.tokens, 0, -1) if tokens % n == 0)
    body = partial(
        _body, several=several, end=pages * page, turned=turn is not None, quantized=scales is not None, told=interpret
    )
    # cos and sin are passed twice: the compiler merges two loads of one address, which cannot have both layouts.
    read = (k, v, ragged.write, *(turn or ()), *(turn or ()), *(scales or ()))
    grid = [("block", tokens // several)]
    done = compat.in_place(
        body, changed=(q, k_pool, v_pool), read=read, grid=grid, name="kv_write", interpret=interpret
    )
    return done[0], done[1], done[2]


def _body(
    q: Any,  # [T, H, D]
    k_pool: Any,  # [N, B, K, D]
    v_pool: Any,  # [N, B, K, D]
    k: Any,  # [T, K, D]
    v: Any,  # [T, K, D]
    write: Any,  # [T] int32
    *rest: Any,  # cos, sin of queries, then of keys, [T, 1, D / 2] float32; scales of keys, values, [K] float32
    several: int,
    end: int,
    turned: bool,
    quantized: bool,
    told: Interpret,
) -> None:
    (heads, dim), kv_heads, page = q.shape[1:], k.shape[1], k_pool.shape[1]
    scales = rest[-2:] if quantized else (None, None)
    wide, narrow, whole = (
        spread(rows, size) for rows, size in ((heads, dim // 2), (kv_heads, dim // 2), (kv_heads, dim))
    )
    row: tuple[Any, ...] = (slice(None),)
    if kv_heads == 1:  # a row is then the whole matrix, and jax 0.10 cannot load half of it as a matrix
        row, narrow, whole = (0,), narrow.reduce(0), whole.reduce(0)
    first = lax.axis_index("block") * several

    for i in range(several):
        t = first + i
        # All loads come before the first store, because a store is a barrier to later loads.
        queries = _turned(q.at[t], [part.at[t, 0] for part in rest[:2]], wide, told) if turned else None
        keys = _halves(k.at[(t, *row)], narrow)
        if turned:
            keys = _turned(k.at[(t, *row)], [part.at[t, 0] for part in rest[2:4]], narrow, told)
        values = compat.load(v.at[(t, *row)], whole, optimized=False)
        place = write[t]

        @pl.when(place < end)
        def _(place: Any = place, keys: Any = keys, values: Any = values) -> None:
            at = lax.div(place, jnp.int32(page)), lax.rem(place, jnp.int32(page))
            for half, part in zip(_both(dim), keys, strict=True):
                k_pool[(*at, *row, half)] = _stored(part, scales[0], narrow, k_pool.dtype)
            v_pool[(*at, *row)] = _stored(values, scales[1], whole, v_pool.dtype)

        if queries is not None:
            for half, part in zip(_both(dim), queries, strict=True):
                q[t, :, half] = part


def _both(dim: int) -> tuple[Any, Any]:
    return pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)


def _halves(x: Any, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Load x [heads, D] as two arrays [heads, D / 2], or x [D] as two of [D / 2]."""
    every = (slice(None),) * (len(x.shape) - 1)
    left, right = (compat.load(x.at[(*every, half)], layout, optimized=False) for half in _both(x.shape[-1]))
    return left, right


def _turned(x: Any, turn: list[Any], layout: Any, told: Interpret) -> tuple[jax.Array, jax.Array]:
    """Return the halves of x [heads, D] or [D], rotated by cos and sin [D / 2]."""
    parts = _halves(x, layout)
    if len(x.shape) == 1:
        cos, sin = (compat.load(part, layout, optimized=False) for part in turn)
    else:
        loaded = (compat.load(part, layout.reduce(0), optimized=False) for part in turn)
        cos, sin = (cast(lax.broadcast_in_dim(part, parts[0].shape, [1]), layout, told) for part in loaded)
    left, right = (part.astype(jnp.float32) for part in parts)
    done = (left * cos - right * sin), (right * cos + left * sin)
    return cast(done[0].astype(x.dtype), layout, told), cast(done[1].astype(x.dtype), layout, told)


def _stored(x: jax.Array, scale: Any, layout: Any, dtype: Any) -> jax.Array:
    """Convert x [K, columns], or [columns] for one kv head, to what the pool stores."""
    if scale is None:
        return x
    if x.ndim == 1:
        per_row = scale[0]
    else:
        per_row = lax.broadcast_in_dim(compat.load(scale, layout.reduce(1), optimized=False), x.shape, [0])
    largest = LARGEST[jnp.dtype(dtype).name]
    small = jnp.minimum(jnp.maximum(x.astype(jnp.float32) / per_row, -largest), largest)
    if jnp.issubdtype(dtype, jnp.integer):
        small = lax.round(small, lax.RoundingMethod.TO_NEAREST_EVEN)
    return small.astype(dtype)


def spread(rows: int, columns: int, longest: int = 8) -> Any:
    """Return a layout of [rows, columns] over the 128 threads of a warpgroup, in vectors of adjacent columns.

    Prefers layouts in which all four warps have their own rows, then long vectors (`longest`
    elements: 16 bytes of bfloat16). With few rows, several warps hold the same data and store it
    twice.
    """
    from jax.experimental.mosaic.gpu import fragmented_array

    found = (0, 0, 0)
    vector = max(1, columns // 32)  # or a row would be longer than a warp
    while vector <= longest and columns % vector == 0 and (32 * vector) % columns == 0:
        deep = 32 * vector // columns  # rows per warp
        if rows % deep == 0:
            warps = next(n for n in (4, 2, 1) if rows // deep % n == 0)
            found = max(found, (warps, vector, deep))
        vector *= 2
    warps, vector, deep = found
    if not warps:
        raise ValueError(f"no layout for {rows=} of {columns=} over 128 threads")
    replicas = {4: (), 2: (fragmented_array.Replicated(2),), 1: (fragmented_array.Replicated(4),)}[warps]
    made: Any = fragmented_array.TiledLayout(
        fragmented_array.Tiling(((warps * deep, columns), (deep, columns), (vector,))),
        warp_dims=(*(() if warps == 1 else (-5,)), *replicas),
        lane_dims=(-3, -2),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return compat.plgpu.Layout.TILED(
        made.tiling, warp_dims=made.warp_dims, lane_dims=made.lane_dims, vector_dim=made.vector_dim
    )
