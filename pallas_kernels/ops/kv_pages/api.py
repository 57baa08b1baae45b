"""Export pages of all layers as one contiguous buffer, and import it into pools in place, for KV transfers.

    export_pages(pools, pages)[l, p] = pools[l][p][pages]        the buffer, [L, parts, M, B, K, D]
    import_pages(pools, pages, kv_buffer)                           the pools with the buffer `kv_buffer` at `pages`

This is plain XLA, because the PTX compiled for Hopper is what a kernel would do: 16-byte loads and
stores, no temporary, no copy of a pool. Three things are needed for that, seen in the PTX of jax
0.11.2:

* elements as uint32: a scatter of bfloat16 moves 8 bytes at a time and a gather 2 (on CPU the
  bitcast costs a copy of one pool at a time, but a scatter of bfloat16 would widen all of them to
  float32);
* `unique_indices`: without it, every bfloat16 element becomes a compare-and-swap loop on its word;
* each layer written to its place in the buffer: stacking compiles to a concatenation with 4-byte
  accesses.

Floor: twice the buffer over the bandwidth, 250 us for 4096 tokens of 32 layers of Llama-3-8B.

Parts are the arrays of a layer's pool: keys and values, or a latent. Letters: L layers, M pages
moved, N pages in the pool, B page size, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import words

Pool = tuple[jax.Array, ...]  # the parts of one layer, each [N, B, K, D]


def export_pages(pools: Sequence[Pool], pages: jax.Array, *, mesh: Mesh | AbstractMesh | None = None) -> jax.Array:
    """Return pages [M] of all layers as one array [L, parts, M, B, K, D]; out-of-range pages are clamped.

    `mesh`: kv heads are split over its axis `tp`. Without it, each device would allocate the whole
    buffer.
    """
    pools = list(pools)
    if mesh is None or mesh.shape["tp"] == 1:
        return _packed(pools, pages)
    heads, kv_buffer = P(None, None, "tp"), P(None, None, None, None, "tp")
    packed: jax.Array = jax.shard_map(_packed, mesh=mesh, in_specs=(heads, P()), out_specs=kv_buffer, check_vma=False)(
        pools, pages
    )
    return packed


def _packed(pools: list[Pool], pages: jax.Array) -> jax.Array:
    first = pools[0][0]
    wide = jax.eval_shape(words.wide, first)
    kv_buffer = lax.empty((len(pools), len(pools[0]), len(pages), *wide.shape[1:]), wide.dtype)
    for layer, pool in enumerate(pools):
        for part, held in enumerate(pool):
            taken = jnp.take(words.wide(held), pages, axis=0, mode="clip")[None, None]
            kv_buffer = lax.dynamic_update_slice(kv_buffer, taken, (layer, part, 0, 0, 0, 0))
    return words.narrow(kv_buffer, first)


def import_pages(pools: Sequence[Pool], pages: jax.Array, kv_buffer: jax.Array) -> list[Pool]:
    """Write `kv_buffer` [L, parts, M, B, K, D] to distinct pages [M] of the pools; drop pages out of range.

    The write is in place if the pools are donated.
    """
    wide = words.wide(kv_buffer)

    def put(held: jax.Array, layer: int, part: int) -> jax.Array:
        after = words.wide(held).at[pages].set(wide[layer, part], mode="drop", unique_indices=True)
        return words.narrow(after, held)

    return [tuple(put(held, layer, part) for part, held in enumerate(pool)) for layer, pool in enumerate(pools)]
