"""Prefill attention over pages on Hopper: chunks of many requests in one launch; compute-bound.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G]   over the keys j that t sees

A chunk's tokens may follow tokens that are already in the cache. The plan (plan.py) cuts rows into
tiles of tokens; a block computes a tile for 1, 2, 4 or 8 query heads of one kv head, which fill the
rows of the products, so any G is supported. q and out keep the layers' layout [T, H, D]; nothing is
transposed outside. Floor: 4 D operations per query head and key seen, at the rate of the tensor
cores.

With D = 256 all value columns would spill registers, so one block mixes half of them and another
block the other half: scores are computed twice, which makes the products half as many again. 8-bit
pools are widened by the producer (prefill_block.py). With D = 256 they are refused: shared memory
holds only one tile of keys, and that config spills (jax 0.11.2: 256 bytes stored and loaded).

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, H query heads, K kv
heads, G = H / K, D head dim, I tiles of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product

import jax
import jax.numpy as jnp

from pallas_kernels.layout import MASKED, Ragged, Scales
from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.interpret import Interpret
from pallas_kernels.mosaic.spec import SMEM, AttentionShape, allowed, refusal
from pallas_kernels.mosaic.support import left_in_registers
from pallas_kernels.ops.paged_attention.hopper.prefill_block import (
    GRID,
    MOST,
    ROLE,
    ROWS,
    WARPGROUPS,
    Config,
    PrefillShape,
)
from pallas_kernels.ops.paged_attention.hopper.prefill_body import body
from pallas_kernels.ops.paged_attention.plan import PrefillWork

__all__ = ["Config", "candidates", "heuristic", "paged_prefill", "supports"]


def heuristic(spec: AttentionShape, *, window: int | None = None) -> Config:
    """Return a config expected to be good for the spec: up to four heads per tile, the widest keys that fit.

    Weights stay in registers where the compiler supports that: storing them to shared memory and
    reading them back takes longer than the products of a tile.

    Avoided because they spill: eight heads (jax 0.11.2: 16 bytes), four heads of D = 256 (0.10.2:
    72), and 128 keys at a time with a window (8).
    """
    heads = next(h for h in (4, 2, 1) if spec.group % h == 0 and (h < 4 or spec.dim <= MOST))
    best = Config(heads=heads, blocks=spec.cores, p_in_smem=not left_in_registers())
    sizes = ((128, 2), (64, 3), (64, 2))[window is not None :]
    for (keys, stages), ahead in product(sizes, (True, False)[spec.dim > MOST :]):
        config = replace(best, keys=keys, stages=stages, ahead=ahead)
        if config.smem_bytes(spec) <= SMEM and not (keys % spec.page and spec.page % keys):
            return config
    return best


def supports(spec: AttentionShape) -> str | None:
    """Return None, or the reason why no config computes the spec."""
    return refusal(heuristic, spec)


def candidates(spec: AttentionShape) -> Iterator[Config]:
    """Yield configs worth timing for the spec, the heuristic one first; the compile gate drops those that spill."""
    best = heuristic(spec)
    sizes = ((128, 2), (128, 3), (64, 1), (64, 2), (64, 3), (64, 4))  # keys, stages
    some = (
        Config(heads, keys, stages, best.above, blocks, p_in_smem, ping_pong, overlap, ahead)
        for ahead, overlap, p_in_smem, ping_pong, heads, (keys, stages), blocks in product(
            (True, False), (False, True), (True, False), (True, False), (1, 2, 4, 8), sizes, (spec.cores, 2**20)
        )
    )
    yield from allowed(chain([best], some), spec)


def paged_prefill(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    work: PrefillWork,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    config: Config,
    interpret: Interpret = None,
    clean: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Return mixed values [T, H, D] in the dtype of q and lse [T, H]; zeros and MASKED for tokens not in `work`.

    `work` is `config.plan(ragged, page=B, window=window)`. Pools must hold finite numbers
    everywhere, even where nothing was written, because masked keys are multiplied by zero.
    `clean=False` leaves arbitrary values in `out` for tokens not in `work` (`work.place` < 0),
    which saves a pass over it if the caller overwrites them anyway.
    """
    tokens, heads, dim = q.shape
    page, kv_heads = k_pool.shape[1:3]
    spec = AttentionShape(ragged.lengths.shape[0], heads, kv_heads, dim, page, tokens, q.dtype, k_pool.dtype)
    config.validate(spec)
    spec.check_scales(scales)
    if scale <= 0:
        raise ValueError(f"{scale=} must be positive")
    padded = jnp.pad(q, ((0, max(0, config.tile // WARPGROUPS - tokens)), (0, 0), (0, 0)))
    tiles = work.tiles.shape[0]
    items = tiles * heads // config.heads * (dim // min(dim, MOST))
    shape = PrefillShape(spec, config, len(padded), tiles, min(config.blocks, items), scale, window, softcap, interpret)
    run = compat.kernel(
        body(shape),
        out=(
            jax.ShapeDtypeStruct(padded.shape, q.dtype),
            jax.ShapeDtypeStruct((shape.head_blocks, tiles, WARPGROUPS * ROWS), jnp.float32),
        ),
        scratch=shape.scratch(),
        grid=((GRID, shape.blocks),),
        threads=(ROLE, WARPGROUPS + 1),
        interpret=interpret,
    )
    out, lse = run(padded, k_pool, v_pool, work.tiles, work.used, work.table, *(scales or ()))
    out = out[:tokens]
    covered = work.place >= 0
    if clean:
        out = jnp.where(covered[:, None, None], out, 0)
    return out, jnp.where(covered[:, None], _by_tokens(lse, work.place, shape), MASKED)


def _by_tokens(lse: jax.Array, place: jax.Array, shape: PrefillShape) -> jax.Array:
    """Gather lse [head blocks, I, 2 M], as the kernel writes it, to [T, H]; arbitrary where `place` < 0."""
    span, tokens = shape.span, place.shape[0]
    within = jnp.maximum(place, 0) % (WARPGROUPS * span)
    token = jnp.arange(tokens) - within % span  # first token of its warpgroup's part
    back = jnp.maximum(token + span - shape.tokens, 0)
    split = lse.reshape(-1, shape.tiles, WARPGROUPS, shape.config.heads, span)
    split = split.transpose(1, 2, 4, 0, 3)  # [I, 2, span, head blocks, heads]
    taken = split[jnp.maximum(place, 0) // (WARPGROUPS * span), within // span, within % span + back]
    return taken.reshape(tokens, -1)
