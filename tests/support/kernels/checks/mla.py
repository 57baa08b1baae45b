"""Check attention to latents (MLA) against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import MASKED, Ragged
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.mla import hopper as latent
from pallas_kernels.ops.mla.hopper import Config, paged_mla
from tests.support.kernels.checks import decode
from tests.support.kernels.checks.decode import LARGEST_ERROR
from tests.support.kernels.interpreted import haste, seed, without_races
from tests.support.kernels.ragged import poisoned
from tests.support.kernels.reference import attention, error, quantized

SMALL = Config(workers=2)
FEW = replace(SMALL, warps=True, tile=32)
EIGHT = replace(SMALL, warps=True)  # for 8-bit latents
BYTES = [jnp.float8_e4m3fn, jnp.int8]
LARGE = 40.0  # standard deviation of 8-bit latents


@dataclass(frozen=True)
class Problem(decode.Problem):
    """Random latents for rows of (tokens, context), and NaN in the pages of no row."""

    heads: int = 4
    values: int = 128
    scale: float = 0.1

    def shape(self, queries: int = 1) -> AttentionShape:
        """Return what a config is chosen for."""
        return replace(super().shape(queries), dim=self.values + latent.TURNING, values=self.values)

    def latents(self) -> tuple[jax.Array, jax.Array]:
        """Return q [T, H, D] and the pool [N, B, 1, D]."""
        random, dim = np.random.default_rng(seed(7)), self.values + latent.TURNING
        tokens = sum(length for length, _ in self.rows) + self.padded
        shapes = (tokens, self.heads, dim), (self.pool, self.page, 1, dim)
        q, pool = (random.standard_normal(shape) for shape in shapes)
        if self.stored is None:
            return jnp.asarray(q, self.dtype), poisoned(pool.astype(self.dtype), self.dealt)
        narrow = quantized(pool, np.full(1, 1 / LARGE), self.stored)
        return jnp.asarray(q / LARGE, self.dtype), poisoned(narrow, self.dealt)


def check(problem: Problem, config: Config) -> None:
    ragged, (q, pool) = problem.ragged(), problem.latents()
    options: dict[str, Any] = {"scale": problem.scale, "window": problem.window, "softcap": problem.softcap}

    # One program, compiled without optimization, because compiling takes most of the time.
    @partial(jax.jit, compiler_options=haste())
    def step(q: jax.Array, pool: jax.Array, ragged: Ragged) -> tuple[jax.Array, jax.Array]:
        work = config.plan(ragged, page=problem.page, window=problem.window)
        return paged_mla(q, pool, work, values=problem.values, config=config, interpret=interpret, **options)

    with without_races() as interpret:
        out, lse = jax.block_until_ready(step(q, pool, jax.tree.map(jnp.asarray, ragged)))
    want, sums = attention(q, pool, pool, ragged, **options)
    assert out.dtype == problem.dtype
    assert error(out, want[..., : problem.values]) < LARGEST_ERROR[jnp.dtype(problem.dtype).name]
    np.testing.assert_allclose(lse, sums, atol=1e-4, rtol=1e-6)
    padding = ragged.rows == len(ragged.lengths)
    assert not np.any(np.asarray(out)[padding]) and np.all(np.asarray(lse)[padding] == np.float32(MASKED))


EDGES = ((1, 1), (1, 63), (1, 64), (0, 0), (1, 65), (1, 300))  # around a page and a tile, and several tiles
