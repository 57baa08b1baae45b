"""The interpreter, which other tests rely on, finds missing waits and fences in kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import cast, interpreter, watch_races, wgmma
from tests.support.kernels.interpreted import needs_interpreter

ROWS, TILES = 64, 3
TILED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def chain(x: jax.Array, *, waits: bool = True, fences: bool = True) -> jax.Array:
    """Sum (x[i] + 1) @ x[i].T over tiles, x [TILES, 64, 64], through a single slot of shared memory.

    A producer that does not wait for the slot overwrites data still being read. Without the fence,
    the slot's ordinary loads and the store of the sum are not ordered with the accesses of TMA and
    the tensor core.
    """
    interpret = interpreter(detect_races=True)

    def body(x: Any, out: Any, slot: Any, more: Any, full: Any, free: Any) -> None:
        role = lax.axis_index("role")

        @pl.when(role == 0)
        def _() -> None:
            def step(i: Any, acc: jax.Array) -> jax.Array:
                plgpu.barrier_wait(full)
                more[...] = slot[...] + 1
                if fences:
                    plgpu.commit_smem()
                acc = wgmma(more, slot, acc, transposed=True, interpret=interpret)
                plgpu.barrier_arrive(free)
                return acc

            zeros = cast(jnp.zeros((ROWS, ROWS), jnp.float32), plgpu.Layout.WGMMA, interpret)
            out[...] = lax.fori_loop(0, TILES, step, zeros)

        @pl.when(role == 1)
        def _() -> None:
            @pl.loop(0, TILES)
            def _(i: Any) -> None:
                if waits:

                    @pl.when(i > 0)
                    def _() -> None:
                        plgpu.barrier_wait(free)

                plgpu.copy_gmem_to_smem(x.at[i], slot, full)

            if waits:
                plgpu.barrier_wait(free)

    memory = plgpu.SMEM((ROWS, ROWS), x.dtype, transforms=TILED)
    barrier = plgpu.Barrier(num_arrivals=1, num_barriers=1)
    run = compat.kernel(
        body,
        out=jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32),
        scratch=[memory, memory, barrier, barrier],
        grid=(("block", 1),),
        threads=("role", 2),
        interpret=interpret,
    )
    out: jax.Array = run(x)
    return out


@pytest.fixture
def tiles() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(-3, 4, (TILES, ROWS, ROWS)), jnp.bfloat16)


@needs_interpreter
def test_a_kernel_that_waits_and_fences_is_right_and_has_no_races(tiles: jax.Array) -> None:
    x = np.asarray(tiles, np.float32)
    with watch_races() as races:
        np.testing.assert_array_equal(chain(tiles), sum((one + 1) @ one.T for one in x))
    assert not races.found()


@needs_interpreter
def test_a_missing_wait_for_a_slot_is_caught(tiles: jax.Array) -> None:
    """It is caught as a race, or because a second arrival follows one that was never waited for."""
    try:
        with watch_races() as races:
            chain(tiles, waits=False).block_until_ready()
        assert races.found()
    except Exception as error:
        assert "phase" in str(error), error
    finally:
        compat.reset_interpreter()


@needs_interpreter
def test_a_missing_fence_is_caught_also_if_a_clean_kernel_follows(tiles: jax.Array) -> None:
    with watch_races() as races:
        chain(tiles, fences=False).block_until_ready()
        chain(tiles).block_until_ready()
    assert races.found()


@needs_interpreter
def test_a_kernel_that_has_not_run_is_not_taken_for_clean() -> None:
    with watch_races() as races, pytest.raises(RuntimeError, match="no kernel has finished"):
        races.found()


@pytest.mark.skipif(compat.DETECTS_RACES, reason="this jax detects races")
def test_races_are_refused_where_they_cannot_be_seen() -> None:
    with pytest.raises(NotImplementedError, match=r"race detection needs jax 0\.11"):
        interpreter(detect_races=True)
