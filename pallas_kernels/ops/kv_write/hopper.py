"""Norm and rotate queries and keys, and write keys and values to their pages in place, in one kernel.

    q, k, v = parts of qkv[t]
    q, k = norm(q), norm(k)                                each head's, if the model has such norms
    q[t] = rotate(q)
    k_pool[write[t]] = rotate(k),  v_pool[write[t]] = v      each / its scale[k] if pools are quantized

The kernel reads the result of the projection of queries, keys and values as it is: splitting it
first would take a launch for each part.

A block takes `tokens` tokens. Its 128 threads load whole rows of heads straight into registers, 16
bytes each if the shape allows, rotate them and store them. Nothing is shared, so there is no shared
memory, and several blocks per multiprocessor hide each other's latency. Padding tokens (`write` out
of range) rotate their queries and write nothing. The numbers are those of XLA (xla.py): normed in
float32, rounded to the dtype of k, rotated in float32, rounded again, then divided, clipped to the
largest value and rounded. Both pools alias the results if they are donated.

Head dims other than 64, 128 and 256 and dtypes other than bfloat16 and float16 are refused.

Floor: q, k and v read and written once, over the bandwidth: 47 us for 8192 tokens of Llama-3-8B; at
decode, the launch.

Letters: T tokens, N pages in the pool, B page size, H query heads, K kv heads, G = H / K, D head dim.
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
from pallas_kernels.mosaic.spec import AttentionShape, check_dtype
from pallas_kernels.mosaic.spread import spread
from pallas_kernels.norms import HeadNorms
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
        check_dtype(spec)
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


def packed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return q [T, H, D], k and v [T, K, D] as the one array that `rope_and_write` reads."""
    tokens, kv_heads, dim = k.shape
    heads = q.reshape(tokens, kv_heads, -1, dim)
    return jnp.concatenate([heads, k[:, :, None], v[:, :, None]], axis=2).reshape(tokens, kv_heads, -1)


def rope_and_write(
    qkv: jax.Array,  # [T, K, (G + 2) * D]: each kv head's queries, key and value
    turn: Turn | None,  # cos, sin [T, 1, D / 2] float32
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    *,
    scales: Scales | None = None,
    norms: HeadNorms | None = None,
    config: Config | None = None,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rotated queries [T, H, D], and the pools with the new keys and values; padding tokens are dropped."""
    tokens, (pages, page, kv_heads, dim) = len(qkv), k_pool.shape
    qkv = qkv.reshape(tokens, kv_heads, -1, dim)
    group = qkv.shape[2] - 2
    config = config or heuristic(tokens)
    config.validate(AttentionShape(1, kv_heads * group, kv_heads, dim, page, dtype=qkv.dtype, kv_dtype=k_pool.dtype))
    if (scales is None) != (k_pool.dtype == qkv.dtype):
        raise ValueError(f"pools of {k_pool.dtype} and keys of {qkv.dtype} need {'no ' * (scales is not None)}scales")
    several = next(n for n in range(config.tokens, 0, -1) if tokens % n == 0)
    facts = {"turned": turn is not None, "quantized": scales is not None}
    rule = None if norms is None else (norms.eps, norms.offset)
    body = partial(_body, several=several, end=pages * page, rule=rule, interpret=interpret, **facts)
    weights = () if norms is None else (norms.q, norms.k)
    # cos and sin are passed twice: the compiler merges two loads of one address, which cannot have both layouts.
    read = (qkv, ragged.write, *weights, *(turn or ()), *(turn or ()), *(scales or ()))
    q, *pools = compat.in_place(
        body,
        created=(jax.ShapeDtypeStruct((tokens, kv_heads, group, dim), qkv.dtype),),
        changed=(k_pool, v_pool),
        read=read,
        grid=[("block", tokens // several)],
        name="kv_write",
        interpret=interpret,
    )
    return q.reshape(tokens, kv_heads * group, dim), pools[0], pools[1]


def _body(
    q: Any,  # [T, K, G, D]
    k_pool: Any,  # [N, B, K, D]
    v_pool: Any,  # [N, B, K, D]
    qkv: Any,  # [T, K, G + 2, D]
    write: Any,  # [T] int32
    # Weights of the norms of queries and keys, [D]; cos, sin of queries, then of keys, [T, 1, D / 2] float32; scales of
    # keys, values, [K] float32; each if there are any.
    *rest: Any,
    several: int,
    end: int,
    rule: tuple[float, float] | None,  # of the norms: eps, and what is added to the weights
    turned: bool,
    quantized: bool,
    interpret: Interpret,
) -> None:
    (kv_heads, group, dim), page = q.shape[1:], k_pool.shape[1]
    scales = rest[-2:] if quantized else (None, None)
    weights, rest = (rest[:2], rest[2:]) if rule else ((None, None), rest)
    # An axis of one head is indexed, because jax 0.10 cannot load half of a row that is the whole matrix.
    row: tuple[Any, ...] = (slice(None),) if kv_heads > 1 else (0,)
    every = (*row, pl.ds(0, group) if group > 1 else 0)
    wide = spread(tuple(size for size in (kv_heads, group) if size > 1), dim // 2)
    narrow, whole = (spread((kv_heads,) * (kv_heads > 1), size) for size in (dim // 2, dim))
    first = lax.axis_index("block") * several

    for i in range(several):
        t = first + i
        # All loads come before the first store, because a store is a barrier to later loads.
        queries = _halves(qkv.at[(t, *every)], wide)
        keys = _halves(qkv.at[(t, *row, group)], narrow)
        if rule:
            queries = _normed(queries, weights[0], rule, wide, interpret)
            keys = _normed(keys, weights[1], rule, narrow, interpret)
        if turned:
            queries = _turned(queries, [part.at[t, 0] for part in rest[:2]], wide, interpret)
            keys = _turned(keys, [part.at[t, 0] for part in rest[2:4]], narrow, interpret)
        values = compat.load(qkv.at[(t, *row, group + 1)], whole, optimized=False)
        place = write[t]

        @pl.when(place < end)
        def _(place: Any = place, keys: Any = keys, values: Any = values) -> None:
            at = lax.div(place, jnp.int32(page)), lax.rem(place, jnp.int32(page))
            for half, part in zip(_both(dim), keys, strict=True):
                k_pool[(*at, *row, half)] = _stored(part, scales[0], narrow, k_pool.dtype)
            v_pool[(*at, *row)] = _stored(values, scales[1], whole, v_pool.dtype)

        for half, part in zip(_both(dim), queries, strict=True):
            q[(t, *every, half)] = part


def _both(dim: int) -> tuple[Any, Any]:
    return pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)


def _halves(x: Any, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Load x [..., D] as two arrays [..., D / 2]."""
    every = (slice(None),) * (len(x.shape) - 1)
    left, right = (compat.load(x.at[(*every, half)], layout, optimized=False) for half in _both(x.shape[-1]))
    return left, right


def _row(x: Any, shape: tuple[int, ...], layout: Any, interpret: Interpret) -> jax.Array:
    """Load x [D / 2] for all heads of `shape`."""
    if len(shape) == 1:
        return compat.load(x, layout, optimized=False)
    heads = tuple(range(len(shape) - 1))
    loaded = compat.load(x, layout.reduce(heads), optimized=False)
    return cast(lax.broadcast_in_dim(loaded, shape, [len(heads)]), layout, interpret)


def _normed(
    halves: tuple[jax.Array, jax.Array], weight: Any, rule: tuple[float, float], layout: Any, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    """Norm each head, of which `halves` [..., D / 2] are the halves, with weight [D]; see `norms.rms_norm`."""
    (eps, offset), shape, dtype = rule, halves[0].shape, halves[0].dtype
    left, right = (part.astype(jnp.float32) for part in halves)
    mean = jnp.sum(left * left + right * right, axis=-1) * (1 / (2 * shape[-1]))
    factor = lax.rsqrt(mean + eps)
    if len(shape) > 1:
        factor = lax.broadcast_in_dim(factor, shape, tuple(range(len(shape) - 1)))
    gains = (
        _row(weight.at[half], shape, layout, interpret).astype(jnp.float32) + offset for half in _both(weight.shape[0])
    )
    normed = [part * factor * gain for part, gain in zip((left, right), gains, strict=True)]
    return cast(normed[0].astype(dtype), layout, interpret), cast(normed[1].astype(dtype), layout, interpret)


def _turned(
    halves: tuple[jax.Array, jax.Array], turn: list[Any], layout: Any, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    """Rotate two halves [..., D / 2] by cos and sin [D / 2]."""
    dtype = halves[0].dtype
    cos, sin = (_row(part, halves[0].shape, layout, interpret) for part in turn)
    left, right = (part.astype(jnp.float32) for part in halves)
    done = (left * cos - right * sin), (right * cos + left * sin)
    return cast(done[0].astype(dtype), layout, interpret), cast(done[1].astype(dtype), layout, interpret)


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
