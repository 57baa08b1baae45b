"""Gated DeltaNet (arXiv 2412.06464): linear attention with a state per request instead of keys and values.

Per value head, with keys k and queries q of length 1, the state M [D, V] of a token follows from the one before:

    M' = exp(g) M + k (beta (v - k^T exp(g) M))^T        out = q^T M'

A short causal convolution of queries, keys and values comes first, and keeps its last inputs. Both are written at
the row's slot when a step computes the layer. A row that begins at position 0 begins with zeros, whatever its slot
holds. Prompts are computed in chunks, as products; the result differs from the recurrence by rounding only.

Letters: T tokens, S rows, N chunks of C tokens, E model dim, K key heads, R value heads per key head, D and V dims of
a key and a value, W channels of a key head in the convolution, J inputs that the convolution keeps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxserve.models.layers import Array, Info, Source, library, matrix
from jaxserve.models.quantized import einsum
from jaxserve.models.spec import ModelSpec
from pallas_kernels.attention.api import Attention as Kernel
from pallas_kernels.attention.api import Pool
from pallas_kernels.layout import Ragged
from pallas_kernels.norms import like

CHUNK = 64  # C, at most
EXACT = lax.Precision.HIGHEST
WIDE = jnp.dtype(jnp.float32)


class Chunks(NamedTuple):
    """The chunks of all rows, those of a row one after the other; unused ones come last and have no row."""

    row: jax.Array  # [N] int32
    tokens: jax.Array  # [N, C] int32, indices in [T]; T where a chunk has fewer
    first: jax.Array  # [N] bool, of its row
    last: jax.Array  # [N] bool


class Rows(NamedTuple):
    """The rows of a step as layers with a state see them; `chunks` is None if every row is one token."""

    slots: jax.Array  # [S] int32; out of range for padding, so that it is not written
    fresh: jax.Array  # [S] bool: the row begins at position 0
    starts: jax.Array  # [S] int32
    lengths: jax.Array  # [S] int32
    of: jax.Array  # [T] int32, row of each token
    at: jax.Array  # [T] int32, place of each token in its row
    chunks: Chunks | None


def rows_of(ragged: Ragged, *, decode: bool) -> Rows:
    """Return the rows of a step, computed once for all layers. decode: every row is one token."""
    assert ragged.slots is not None
    count, tokens = len(ragged.starts), len(ragged.rows)
    of = jnp.minimum(ragged.rows, count - 1)
    at = jnp.arange(tokens, dtype=jnp.int32) - ragged.starts[of]
    chunks = None if decode else _chunks(ragged, min(CHUNK, max(16, tokens // count)))
    fresh = ragged.contexts == ragged.lengths
    return Rows(ragged.slots, fresh, ragged.starts, ragged.lengths, of, at, chunks)


def _chunks(ragged: Ragged, size: int) -> Chunks:
    count, tokens = len(ragged.starts), len(ragged.rows)
    each = -(-ragged.lengths // size)  # [S]
    ends = jnp.cumsum(each)
    at = jnp.arange(tokens // size + min(count, tokens), dtype=jnp.int32)  # [N]
    row = jnp.searchsorted(ends, at, side="right").astype(jnp.int32)
    used = row < count
    row = jnp.minimum(row, count - 1)
    place = at - (ends - each)[row]  # of the chunk in its row
    within = place[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    real = used[:, None] & (within < ragged.lengths[row][:, None])
    index = jnp.where(real, ragged.starts[row][:, None] + within, tokens)
    return Chunks(row, index, used & (place == 0), used & (place == each[row] - 1))


class DeltaNet(nnx.Module):
    """A layer's gated DeltaNet, called as `layers.Attention` is; weights are kept together by key head."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        assert spec.delta is not None
        self.spec, self.delta = spec, spec.delta
        delta, e = self.delta, spec.dim
        k, r, z = delta.key_heads, delta.repeats, delta.repeats * delta.value_dim
        self.inputs = _by_head(f"{prefix}in_proj_qkvz.weight", k, delta.channels + z, e)
        self.rates = _by_head(f"{prefix}in_proj_ba.weight", k, 2 * r, e)
        source = Source(f"{prefix}conv1d.weight", (k * delta.channels, 1, delta.kept + 1))
        self.conv = nnx.Param(
            Info((delta.kept + 1, k, delta.channels), ("pack", "heads", "pack"), (source,), self._conv, 0.3)
        )
        self.decay = _of_heads(f"{prefix}A_log", k, r, -3.0)
        self.step = _of_heads(f"{prefix}dt_bias", k, r)
        v = delta.value_dim
        self.norm = nnx.Param(Info((v,), ("pack",), (Source(f"{prefix}norm.weight", (v,)),), lambda x: x, 0.0, 1.0))
        self.out = matrix(prefix + "out_proj.weight", k * z, e, ("heads", "dim"))

    def _conv(self, x: Array) -> Array:
        """Order the taps [all queries, all keys, all values] by key head: [J + 1, K, W]."""
        delta, xp, parts, at = self.delta, library(x), [], 0
        for width in (delta.key_dim, delta.key_dim, delta.repeats * delta.value_dim):
            end = at + delta.key_heads * width
            parts.append(x[at:end, 0].reshape(delta.key_heads, width, -1))
            at = end
        return xp.moveaxis(xp.concatenate(parts, axis=1), -1, 0)  # type: ignore[no-any-return]

    def __call__(
        self, x: jax.Array, rows: Rows, pool: Pool, kernel: Kernel
    ) -> tuple[jax.Array, Pool]:  # x [T, E] -> [T, E]
        mixed = einsum("te,ekw->tkw", x, self.inputs[...])  # [T, K, W + R * V]
        # Of one input, XLA would join both products, and copy both weights to that end in every step.
        rates = einsum("te,ekr->tkr", lax.optimization_barrier(x), self.rates[...])  # [T, K, 2 * R]
        weights = (self.conv[...], self.decay[...], self.step[...], self.norm[...])
        compute = partial(_heads, self.spec)
        if kernel.mesh is not None and kernel.mesh.shape["tp"] > 1:
            tokens, pages = P(None, "tp"), self.spec.cache.partition
            shared = jax.tree.map(lambda _: P(), rows)
            by_head = (P(None, "tp"), P("tp"), P("tp"), P())
            compute = jax.shard_map(
                compute, mesh=kernel.mesh, in_specs=(tokens, tokens, by_head, shared, (pages, pages)),
                out_specs=(tokens, (pages, pages)), check_vma=False,
            )  # fmt: skip
        out, pool = compute(mixed, rates, weights, rows, pool)
        return out.reshape(len(x), -1) @ self.out[...], pool


def _by_head(name: str, heads: int, width: int, dim: int) -> nnx.Param[Info]:
    """Describe a projection [E, K, width] of a tensor that is ordered by key head."""

    def build(x: Array) -> Array:
        return library(x).moveaxis(x.reshape(heads, width, -1), -1, 0)  # type: ignore[no-any-return]

    source = Source(name, (heads * width, dim))
    return nnx.Param(Info((dim, heads, width), ("dim", "heads", "pack"), (source,), build, contract=0))


def _of_heads(name: str, heads: int, repeats: int, fill: float = 1.0) -> nnx.Param[Info]:
    """Describe a number of each value head, [K, R]."""
    source = Source(name, (heads * repeats,))
    return nnx.Param(
        Info((heads, repeats), ("heads", "pack"), (source,), lambda x: x.reshape(heads, repeats), 0.0, fill, WIDE)
    )


def _heads(
    spec: ModelSpec,
    mixed: jax.Array,  # [T, K, W + R * V]
    rates: jax.Array,  # [T, K, 2 * R]
    weights: tuple[jax.Array, ...],
    rows: Rows,
    pool: Pool,
) -> tuple[jax.Array, Pool]:
    """Compute a shard's heads: [T, K, R, V], and the updated states."""
    delta, first = spec.delta, spec.kv_heads_first
    assert delta is not None
    conv, decay, step, norm = weights
    inputs, state = pool
    mixed, gate = mixed[..., : delta.channels], mixed[..., delta.channels :]
    mixed, inputs = _convolved(mixed, conv, rows, jnp.swapaxes(inputs, 1, 2) if first else inputs)
    q, k, v = jnp.split(mixed, [delta.key_dim, 2 * delta.key_dim], axis=-1)
    v = v.reshape(*v.shape[:2], delta.repeats, delta.value_dim)  # [T, K, R, V]
    b, a = jnp.split(rates.astype(WIDE), 2, axis=-1)
    beta, g = jax.nn.sigmoid(b), -jnp.exp(decay)[None] * jax.nn.softplus(a + step[None])  # [T, K, R]
    run = _recurrent if rows.chunks is None else _chunked
    state = state if first else jnp.swapaxes(state, 1, 2)  # [slots, K, R, D, V]
    out, state = run(_unit(q) * delta.key_dim**-0.5, _unit(k), v, g, beta, state, rows)
    state = state if first else jnp.swapaxes(state, 1, 2)
    out = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + spec.norm_eps)
    out = like(norm, out) * out.astype(norm.dtype) * jax.nn.silu(gate.astype(WIDE)).reshape(out.shape)
    return out.astype(gate.dtype), (jnp.swapaxes(inputs, 1, 2) if first else inputs, state)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _convolved(x: jax.Array, taps: jax.Array, rows: Rows, held: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Convolve x [T, K, W] along each row; held: the last inputs of each slot, [slots, J, K, W]."""
    kept, wide = held.shape[1], x.astype(WIDE)
    before = held.at[rows.slots].get(mode="clip")  # [S, J, K, W]
    before = jnp.where(rows.fresh[:, None, None, None], 0, before)
    out = jnp.zeros_like(wide)
    for back in range(kept + 1):
        old = before[rows.of, jnp.clip(kept - back + rows.at, 0, kept - 1)]
        mine = jnp.roll(wide, back, axis=0)
        out += jnp.where((rows.at >= back)[:, None, None], mine, old) * taps[kept - back].astype(WIDE)[None]
    ends = rows.lengths[:, None] - kept + jnp.arange(kept)[None]  # [S, J], places in the row; below 0: before it
    new = wide.at[rows.starts[:, None] + ends].get(mode="clip")
    old = jnp.take_along_axis(before, jnp.clip(ends + kept, 0, kept - 1)[..., None, None], axis=1)
    held = held.at[rows.slots].set(jnp.where((ends >= 0)[..., None, None], new, old), mode="drop")
    return jax.nn.silu(out).astype(x.dtype).astype(WIDE), held


def _recurrent(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Compute rows of one token each: q, k [S, K, D], v [S, K, R, V], g, beta [S, K, R]."""
    old = jnp.where(rows.fresh[:, None, None, None, None], 0, state.at[rows.slots].get(mode="clip"))
    old = old * jnp.exp(g)[..., None, None]
    told = jnp.einsum("skd,skrdv->skrv", k, old, precision=EXACT)
    change = (v - told) * beta[..., None]
    new = old + jnp.einsum("skd,skrv->skrdv", k, change, precision=EXACT)
    out = jnp.einsum("skd,skrdv->skrv", q, new, precision=EXACT)
    return out, state.at[rows.slots].set(new, mode="drop")


def _chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Compute rows of any length by chunks: q, k [T, K, D], v [T, K, R, V], g, beta [T, K, R]."""
    chunks = rows.chunks
    assert chunks is not None
    q, k = (jnp.moveaxis(x.at[chunks.tokens].get(mode="fill", fill_value=0), 1, 2)[:, :, None] for x in (q, k))
    v, g, beta = (
        jnp.moveaxis(x.at[chunks.tokens].get(mode="fill", fill_value=0), 1, 3) for x in (v, g, beta)
    )  # [N, K, R, C, ...]; q, k [N, K, 1, C, D]
    total = jnp.cumsum(g, axis=-1)  # [N, K, R, C]
    size = total.shape[-1]
    lower = jnp.tril(jnp.ones((1, 1, 1, size, size), bool))
    between = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))  # decay from j to i
    multiply = partial(jnp.matmul, precision=EXACT)
    keys = k * beta[..., None]  # [N, K, R, C, D]
    system = multiply(keys, jnp.swapaxes(k, -1, -2)) * between
    solve = partial(lax.linalg.triangular_solve, left_side=True, lower=True, unit_diagonal=True)
    values = solve(system, v * beta[..., None])  # [N, K, R, C, V]
    keys = solve(system, keys * jnp.exp(total)[..., None])
    seen = multiply(q, jnp.swapaxes(k, -1, -2)) * between
    ends = total[..., -1:]
    asked, kept = q * jnp.exp(total)[..., None], k * jnp.exp(ends - total)[..., None]
    slots, fresh = rows.slots[chunks.row], rows.fresh[chunks.row]

    def chunk(carry: tuple[jax.Array, jax.Array], given: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, mine = carry
        values, keys, seen, asked, kept, end, slot, fresh, first, last = given
        begun = jnp.where(fresh, 0, state.at[slot].get(mode="clip"))
        mine = jnp.where(first, begun, mine)
        change = values - multiply(keys, mine)
        out = multiply(asked, mine) + multiply(seen, change)
        mine = mine * jnp.exp(end)[..., None] + multiply(jnp.swapaxes(kept, -1, -2), change)
        return (state.at[jnp.where(last, slot, len(state))].set(mine, mode="drop"), mine), out

    each = (values, keys, seen, asked, kept, ends, slots, fresh, chunks.first, chunks.last)
    (state, _), out = lax.scan(chunk, (state, jnp.zeros_like(state[0])), each)  # out [N, K, R, C, V]
    tokens = len(rows.of)
    out = jnp.moveaxis(out, 3, 1).reshape(-1, *out.shape[1:3], out.shape[-1])  # [N * C, K, R, V]
    return jnp.zeros((tokens, *out.shape[1:]), WIDE).at[chunks.tokens.reshape(-1)].set(out, mode="drop"), state
