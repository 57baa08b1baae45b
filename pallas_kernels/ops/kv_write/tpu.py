"""Write the keys and values of a step to their pages on TPU, in place: one HBM copy per token and pool.

An XLA scatter would do, but is not always in place: for 256 tokens on a v6e, libtpu 0.0.42 chooses
another layout and copies the whole pool there and back.

Letters: T tokens, N pages in the pool, B page size, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as _pltpu

from pallas_kernels.layout import Ragged

pltpu: Any = _pltpu  # as Any: its types change between versions
Ref = Any


def write_kv(
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,
    k: jax.Array,  # [T, K, D]
    v: jax.Array,
    ragged: Ragged,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Write k and v to `ragged.write` of the pools; padding tokens, which are out of range there, are dropped."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    run = pl.pallas_call(
        _body,
        out_shape=tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[anywhere] * 4,
            out_specs=(anywhere, anywhere),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={3: 0, 4: 1},
        interpret=pltpu.InterpretParams() if interpret is True else interpret or False,
        name="write_kv",
    )
    written: tuple[jax.Array, jax.Array] = run(
        ragged.write, k.astype(k_pool.dtype), v.astype(v_pool.dtype), k_pool, v_pool
    )
    return written


def _body(where: Ref, k: Ref, v: Ref, k_in: Ref, v_in: Ref, k_pool: Ref, v_pool: Ref, landed: Ref) -> None:
    pages, size = k_pool.shape[:2]

    def each(token: jax.Array, wait: bool) -> None:
        slot = where[token]

        @pl.when(slot < pages * size)
        def copy() -> None:
            for new, pool in ((k, k_pool), (v, v_pool)):
                write = pltpu.make_async_copy(new.at[token], pool.at[slot // size, slot % size], landed)
                write.wait() if wait else write.start()

    def start(token: jax.Array, _: None) -> None:
        each(token, False)

    def wait(token: jax.Array, _: None) -> None:
        each(token, True)

    # No two tokens go to the same place, so all copies can be in flight at once.
    lax.fori_loop(0, jnp.int32(k.shape[0]), start, None)
    lax.fori_loop(0, jnp.int32(k.shape[0]), wait, None)
