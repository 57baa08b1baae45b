"""Export and import of pages: data arrives unchanged, nothing else changes, nothing is copied."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.ops.kv_pages.api import export_pages, import_pages
from tests.support.kernels.checks.kv_pages import DTYPES, LAYERS, PAGES, check, pools


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def test_pages_arrive_as_they_left_and_nothing_else_changes(dtype: Any) -> None:
    check(dtype)


def test_pools_of_one_array_are_moved_alike() -> None:
    """A latent KV cache, whose width and number of heads are not powers of two."""
    here, there = ([(k,) for k, _ in pools(jnp.bfloat16, seed, (12, 4, 1, 20))] for seed in (0, 1))
    kv_buffer = jax.jit(export_pages)(here, PAGES)
    assert kv_buffer.shape == (LAYERS, 1, len(PAGES), 4, 1, 20)
    after = jax.jit(import_pages)(there, PAGES, kv_buffer)
    for (was,), (source,), (got,) in zip(there, here, after, strict=True):
        want = np.array(was)
        want[[7, 2, 0]] = np.asarray(source)[[7, 2, 0]]
        np.testing.assert_array_equal(np.asarray(got), want)


def test_an_odd_head_dim_is_moved_as_it_is() -> None:
    here = pools(jnp.bfloat16, shape=(6, 4, 2, 5))
    kv_buffer = export_pages(here, PAGES[1:2])
    np.testing.assert_array_equal(np.asarray(kv_buffer[1, 0, 0]), np.asarray(here[1][0][2]))


def test_import_is_in_place() -> None:
    shape = (256, 16, 2, 64)
    held = [(jax.ShapeDtypeStruct(shape, jnp.float32),) * 2] * LAYERS
    kv_buffer = jax.ShapeDtypeStruct((LAYERS, 2, 4, *shape[1:]), jnp.float32)
    pages = jax.ShapeDtypeStruct((4,), jnp.int32)
    memory = jax.jit(import_pages, donate_argnums=0).lower(held, pages, kv_buffer).compile().memory_analysis()
    whole = LAYERS * 2 * 4 * int(np.prod(shape))
    assert memory is not None
    assert memory.alias_size_in_bytes == whole
    assert memory.temp_size_in_bytes < whole / 8, "a pool was copied"


def test_heads_split_over_devices_stay_where_they_are() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    pool = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
    kv_buffer = NamedSharding(mesh, PartitionSpec(None, None, None, None, "tp"))
    here = jax.device_put(pools(jnp.bfloat16), pool)
    program = jax.jit(partial(export_pages, mesh=mesh), out_shardings=kv_buffer)
    got = program(here, PAGES)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(export_pages(pools(jnp.bfloat16), PAGES)))
    back = partial(jax.jit, out_shardings=[(pool, pool)] * LAYERS, donate_argnums=0)(import_pages)
    for one, other in zip(jax.tree.leaves(back(here, PAGES, got)), jax.tree.leaves(pools(jnp.bfloat16)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    compiled = program.lower(jax.device_put(pools(jnp.bfloat16), pool), PAGES).compile()
    assert "all-gather" not in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < got.nbytes, "each device allocates a whole buffer"
