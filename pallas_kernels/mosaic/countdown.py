"""Count the blocks that have arrived at a point; none waits for another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import inline
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, is_interpreting


def is_last(counter: Any, most: jax.Array, interpret: Interpret = None) -> jax.Array:
    """Return whether this warpgroup is the last of `most` + 1 that count on `counter`; see `inline.count_down`.

    `counter` is an int32 in global memory that starts at `most`, and is left there by the last one.
    Results of bulk copies count as stored once `wait_smem_to_gmem` has returned. The interpreter runs
    one block at a time, so it counts by a load and a store.
    """
    if is_interpreting(interpret):
        old = counter[...]
        counter[...] = jnp.where(old == 0, most, old - 1)
        return jnp.equal(old, 0)
    make = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=None),
    )
    return jnp.equal(make(_count)(counter, most), 1)


def _count(_: Any, counter: Any, most: Any) -> Any:
    word = inline.count_down(counter, most.registers.item())
    return inline.FragmentedArray.splat(word, (), is_signed=True)
