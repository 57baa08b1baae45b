"""Cases with one planted fault each, for the compile gate to find: `--cases planted`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes
from pallas_kernels.mosaic.compat import kernel

ROW = 2048


def _scaled_by_its_sum(x: jax.Array, rows: int) -> jax.Array:
    """Multiply x [rows, ROW] by its sum; the whole block is live in registers while it is summed."""
    return _mapped(x, rows, lambda block: block * jnp.sum(block))


def _mapped(x: jax.Array, rows: int, formula: Callable[[Any], Any]) -> jax.Array:
    def body(given: Any, out: Any) -> None:
        out[...] = formula(given[...])

    run = kernel(
        body, out=jax.ShapeDtypeStruct((rows, ROW), jnp.float32), scratch=(), grid=(("x", 1),), threads=("w", 1)
    )
    made: jax.Array = run(x)
    return made


def _abort(x: jax.Array) -> jax.Array:
    os.abort()


def cases() -> list[Case]:
    small, large, pool = ((8, ROW), jnp.float32), ((32, ROW), jnp.float32), ((1 << 14, 16, 8, 32), jnp.float32)
    return [
        Case("sound", lambda x: _scaled_by_its_sum(x, 8), shapes(small)),
        Case("spills", lambda x: _scaled_by_its_sum(x, 32), shapes(large)),
        Case("lacks wgmma", lambda x: _scaled_by_its_sum(x, 8), shapes(small), needs=frozenset({"wgmma"})),
        Case("approximates", lambda x: _mapped(x, 8, jnp.tanh), shapes(small)),
        Case("changes in place", lambda pool: pool.at[3].set(0), shapes(pool), donate=(0,)),
        Case("loses its donation", lambda pool: pool[1:] + 1, shapes(pool), donate=(0,)),
        Case("copies its pool", lambda pool: pool.swapaxes(1, 2), shapes(pool)),
        Case("aborts", _abort, shapes(small)),
        Case("raises", lambda x: x.reshape(7), shapes(small)),
    ]
