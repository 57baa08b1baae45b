"""8-bit latents, written and attended to in XLA, against float64.

Each column has a scale, which the caller folds into queries and mixed values, as
`jaxserve/models/deepseek.py` does.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels.attention import xla
from pallas_kernels.layout import Ragged
from pallas_kernels.ops.kv_write.xla import LARGEST
from pallas_kernels.ops.paged_attention.api import AttentionInputs
from tests.support.examples import cases
from tests.support.kernels import reference
from tests.support.kernels.ragged import deal, make

PAGE, POOL, HEADS, RANK, TURNED, SCALE = 4, 48, 5, 24, 8, 0.1
DIM = RANK + TURNED
EDGES = (1, PAGE - 1, PAGE, PAGE + 1, 0)  # an empty row last: token i is all of row i
# Contexts end at an edge, and rows have one token or all of their context.
STEPS = {
    "decode": [(min(1, context), context) for context in EDGES],
    "prompts": [(context, context) for context in (*EDGES, 19)],
    "mixed": [(1, 33), (3, PAGE + 1), (0, 0), (PAGE, 2 * PAGE), (1, 1), (PAGE + 1, 17)],
}


def columns(seed: int) -> npt.NDArray[np.float32]:
    """Make scales of columns that vary as in real models: a few are far larger."""
    made: npt.NDArray[np.float32] = np.random.default_rng(seed).uniform(0.01, 0.03, DIM).astype(np.float32)
    made[[3, RANK + 1, -1]] *= 40
    return made


BARE = [("decode", jnp.float8_e4m3fn, 1), ("mixed", jnp.int8, 1)]
CASES = cases(BARE, product(STEPS, (jnp.float8_e4m3fn, jnp.int8), (1, 5)), apart=True)


@pytest.mark.parametrize(("kind", "stored", "copies"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_step_equals_the_reference(kind: str, stored: Any, copies: int) -> None:
    rows, decode = STEPS[kind], kind == "decode"
    ragged = make(
        rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL, width=12,
        tokens=len(rows) if decode else sum(length for length, _ in rows) + 2,
    )  # fmt: skip
    if decode:
        ragged = ragged._replace(starts=np.arange(len(rows), dtype=np.int32))
    scale, random = columns(1), np.random.default_rng(2)
    # Up to 1.1 times the 8-bit range, so that some values are clipped.
    reach = scale * LARGEST[jnp.dtype(stored).name] * 1.1
    tokens = len(ragged.rows)
    new = (random.uniform(-1, 1, (tokens, copies, DIM)) * reach).astype(np.float32)
    old = (random.uniform(-1, 1, (POOL, PAGE, copies, DIM)) * reach / scale).astype(np.float32)
    held = reference.quantized(old, np.ones(copies), stored)
    q = (random.standard_normal((tokens, HEADS, DIM)) / reach).astype(np.float32)

    @jax.jit
    def step(q: jax.Array, new: jax.Array, pool: jax.Array, ragged: Ragged) -> tuple[jax.Array, jax.Array]:
        attention = xla.make(None, decode)
        with jax.default_matmul_precision("highest"):
            inputs = AttentionInputs(q * scale[None, None], new / scale[None, None], None, None, scale=SCALE)
            mixed, (pool,) = attention(inputs, (pool,), attention.plan(ragged))
        return mixed * scale[None, None], pool

    mixed, pool = step(q, new, held, ragged)
    narrow = reference.quantized(new / scale, np.ones(copies), stored)
    expected = reference.written(held, narrow, ragged.write)
    np.testing.assert_array_equal(pool, expected)
    wide = reference.doubles(expected) * scale
    want, _ = reference.attention(q, wide, wide, ragged, scale=SCALE)
    assert reference.error(mixed[..., :RANK], want[..., :RANK]) < 1e-5


@pytest.mark.parametrize("stored", [jnp.float8_e4m3fn, jnp.int8])
def test_rounding_is_to_the_nearest_and_never_nan(stored: Any) -> None:
    x = np.array([np.inf, -np.inf, 1e9, -500.0, 0.5, 1.5, -0.3, 0.0], np.float32).reshape(1, 1, 8)
    attention = xla.make(None, True)
    work = attention.plan(jax.tree.map(jnp.asarray, make([(1, 1)], [[0]], page=1, pool=1)))
    inputs = AttentionInputs(jnp.zeros((1, 1, 8)), jnp.asarray(x), None, None, scale=1.0)
    _, (pool,) = attention(inputs, (jnp.zeros((1, 1, 1, 8), stored),), work)
    largest = LARGEST[jnp.dtype(stored).name]
    small = [0.0, 2.0, -0.0, 0.0] if stored == jnp.int8 else [0.5, 1.5, -0.3125, 0.0]
    np.testing.assert_array_equal(reference.doubles(pool).reshape(-1), [largest, -largest, largest, -largest, *small])
