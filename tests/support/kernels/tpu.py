"""Steps for the TPU kernels, interpreted with race detection and compared with the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.ops.paged_attention.tpu.config import Config
from pallas_kernels.ops.paged_attention.tpu.kernel import paged_attention
from pallas_kernels.ops.paged_attention.tpu.plan import plan_decode, plan_prefill
from tests.support.kernels import reference
from tests.support.kernels.ragged import deal, make

POOL, DIM = 48, 16
TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3}


@dataclass(frozen=True)
class Options:
    """The static options of a run."""

    config: Config
    above: int | None = None  # None: decode
    scale: float = 0.3
    window: int | None = None
    softcap: float | None = None

    @property
    def scores(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap}


@dataclass(frozen=True)
class Step:
    """Random values for rows of (length, context) over shuffled pages; unused slots are NaN."""

    q: jax.Array
    pools: tuple[jax.Array, jax.Array]
    ragged: Ragged
    scales: Scales | None = None


def step(
    rows: Sequence[tuple[int, int]],
    kv_heads: int,
    group: int,
    *,
    page: int = 4,
    dtype: str = "float32",
    stored: str | None = None,
    tables: list[list[int]] | None = None,
    seed: int = 0,
) -> Step:
    """Make a step with three padding tokens and two padding rows. `stored`: dtype of quantized pools."""
    rng = np.random.default_rng(seed)
    tokens = sum(length for length, _ in rows)
    tables = deal(rows, page=page, pool=POOL, seed=seed) if tables is None else tables
    ragged = make(rows, tables, page=page, pool=POOL, tokens=tokens + 3, padded_rows=len(rows) + 2, width=12)
    q = jnp.asarray(rng.standard_normal((tokens + 3, kv_heads * group, DIM)), dtype)
    filled = rng.standard_normal((2, POOL, page, kv_heads, DIM)).astype(np.float32)
    if stored is not None:
        scales = rng.uniform(0.01, 0.03, (2, kv_heads)).astype(np.float32)
        k, v = (reference.quantized(x, s, stored) for x, s in zip(filled, scales, strict=True))
        return Step(q, (jnp.asarray(k), jnp.asarray(v)), ragged, Scales(*map(jnp.asarray, scales)))
    held = np.zeros((POOL, page), bool)
    for (_, context), pages in zip(rows, tables, strict=True):
        at = np.arange(context)
        held[np.asarray(pages, int)[at // page], at % page] = True
    filled[:, ~held] = np.nan
    return Step(q, (jnp.asarray(filled[0], dtype), jnp.asarray(filled[1], dtype)), ragged)


@partial(jax.jit, static_argnames=("options",))
def _run(q: Any, k: Any, v: Any, ragged: Ragged, scales: Scales | None, options: Options) -> Any:
    config = options.config
    if options.above is None:
        work = plan_decode(ragged, queries=config.queries)
    else:
        work = plan_prefill(ragged, queries=config.queries, above=options.above)
    interpret = pltpu.InterpretParams(detect_races=True)
    return paged_attention(q, k, v, ragged, work, scales=scales, config=config, interpret=interpret, **options.scores)


def run(given: Step, options: Options) -> tuple[jax.Array, jax.Array]:
    ragged = jax.tree.map(jnp.asarray, given.ragged)
    out, lse = jax.block_until_ready(_run(given.q, *given.pools, ragged, given.scales, options))
    return out, lse


def races_found() -> bool:
    """Return whether the last kernel had unordered accesses to one address."""
    found = interpret_pallas_call.races
    assert found is not None, "no kernel was interpreted"
    return bool(found.races_found)


def check(given: Step, options: Options) -> tuple[jax.Array, jax.Array]:
    """Run the kernel and check it: values and lse of its rows, zeros and MASKED elsewhere, no race."""
    out, lse = run(given, options)
    most, least = (10**6, options.above + 1) if options.above is not None else (options.config.queries, 1)
    lengths = np.asarray(given.ragged.lengths)
    mine = (lengths >= least) & (lengths <= most)
    only = given.ragged._replace(lengths=np.where(mine, lengths, 0))
    want, want_lse = reference.attention(given.q, *given.pools, only, scales=given.scales, **options.scores)
    assert out.dtype == given.q.dtype and lse.dtype == jnp.float32
    bound = TOLERANCE[given.q.dtype.name]
    assert reference.error(out, want) < bound
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=bound)
    idle = want_lse[:, 0] < -1e29
    assert idle.sum() >= 3 and not np.any(np.asarray(out, np.float32)[idle])
    assert not races_found()
    return out, lse
