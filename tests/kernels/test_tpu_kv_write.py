"""The TPU kernel that writes keys and values, in the interpreter: equal to the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ops.kv_write.tpu import write_kv
from tests.support.kernels import reference
from tests.support.kernels.ragged import deal, make
from tests.support.kernels.tpu import races_found


def test_tokens_land_on_their_pages_and_padding_nowhere() -> None:
    rows = [(3, 9), (1, 4), (0, 0), (5, 5)]
    ragged = make(rows, deal(rows, page=4, pool=12), page=4, pool=12, tokens=12, padded_rows=5)
    rng = np.random.default_rng(0)
    pools = [jnp.asarray(rng.standard_normal((12, 4, 2, 8)), jnp.bfloat16) for _ in "kv"]
    new = [jnp.asarray(rng.standard_normal((12, 2, 8)), jnp.float32) for _ in "kv"]
    interpret = pltpu.InterpretParams(detect_races=True)
    got = jax.jit(lambda *xs: write_kv(*xs, interpret=interpret))(*pools, *new, jax.tree.map(jnp.asarray, ragged))
    for after, pool, values in zip(got, pools, new, strict=True):
        np.testing.assert_array_equal(np.asarray(after), reference.written(pool, values, ragged.write))
    assert not races_found()
