"""Compile-gate cases of the MLA kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes, step_shapes
from pallas_kernels.layout import Ragged
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.mla.hopper import FEW, Config, heuristic, paged_mla


def cases() -> Iterator[Case]:
    """Yield every config in use: pages, dtypes, numbers of heads, and rows of several tokens."""
    lite = AttentionShape(64, 16, 1, 576, 64, values=512)
    for name, spec in (
        ("16 heads", lite),
        ("16 heads", replace(lite, page=16)),
        ("16 heads", replace(lite, dtype=jnp.float16, kv_dtype=jnp.float16)),
        ("16 heads", replace(lite, queries=2)),
        ("16 heads", replace(lite, queries=16)),
        ("32 heads", replace(lite, heads=32)),
        ("64 heads", replace(lite, heads=64)),
        ("128 heads", replace(lite, heads=128)),
        ("128 heads", replace(lite, heads=128, page=16)),
    ):
        for warps in (False, True):
            if not warps or spec.queries * spec.heads <= FEW:
                yield _case(name, spec, heuristic(spec, warps=warps), spec.rows * spec.queries)
    prompts = replace(lite, queries=64)
    yield _case("16 heads prompts", prompts, heuristic(prompts), 8192)
    for name, spec in (
        ("16 heads", replace(lite, kv_dtype=jnp.float8_e4m3fn)),
        ("16 heads", replace(lite, kv_dtype=jnp.int8)),
        ("16 heads", replace(lite, kv_dtype=jnp.int8, page=16)),
        ("8 heads", replace(lite, kv_dtype=jnp.float8_e4m3fn, heads=8, queries=2)),
        ("128 heads", replace(lite, kv_dtype=jnp.float8_e4m3fn, heads=128)),
    ):
        yield _case(name, spec, heuristic(spec), spec.rows * spec.queries)
    prompts = replace(prompts, kv_dtype=jnp.float8_e4m3fn)
    yield _case("16 heads prompts", prompts, heuristic(prompts), 8192)


def _case(name: str, spec: AttentionShape, config: Config, tokens: int) -> Case:
    return Case(
        name=f"mla {name} {'mma' if config.warps else 'wgmma'} {jnp.dtype(spec.kv_dtype).name} page{spec.page}"
        f" t{tokens}",
        program=partial(_step, spec=spec, config=config),
        arguments=shapes(
            ((tokens, spec.heads, spec.dim), spec.dtype),
            ((4096, spec.page, 1, spec.dim), spec.kv_dtype),
            *step_shapes(tokens, spec.rows, 32768 // spec.page),
        ),
        needs=frozenset({"mma" if config.warps else "wgmma", "tma"}),
        least_jax=(0, 11) if config.warps and not spec.quantized else (0, 10),
    )


def _step(
    q: jax.Array, pool: jax.Array, *fields: jax.Array, spec: AttentionShape, config: Config
) -> tuple[jax.Array, jax.Array]:
    """Plan and attend, as one layer of a step does."""
    work = config.plan(Ragged.of(fields), page=spec.page, short=spec.queries == 1)
    return paged_mla(q, pool, work, values=spec.values, scale=spec.dim**-0.5, config=config)
