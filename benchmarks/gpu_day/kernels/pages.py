"""Time what moves KV: writes of new tokens, and pages as contiguous buffers and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_day.part import Run
from pallas_kernels.ops.kv_write.hopper import packed
from pallas_kernels.ops.kv_write.xla import rope_and_write_xla

from .cases import Case
from .timing import InPlace, Timing, interpreter_or_none, normal, writing


def kv_write(run: Run, tokens: int, rows: int) -> None:
    """Time RoPE and the KV write of a step of `tokens` new tokens in `rows` rows."""
    time = Timing(run)
    each = tokens // rows
    case = Case(f"kv write {tokens}", ((each, max(each, 512)),) * rows)
    if time.dry:
        case = Case(f"kv write {tokens}", ((each, max(each, 20)),) * rows, 16, 4, 2, 64, jnp.float16, pools=2)
    ragged, pages = case.ragged()
    angle = normal((case.tokens, 1, case.dim // 2), jnp.float32, 5)
    turn = jnp.cos(angle), jnp.sin(angle)
    new = [normal((case.tokens, case.kv_heads, case.dim), case.dtype, i) for i in (6, 7)]
    q = case.queries_of()
    kv = 2 * tokens * case.kv_heads * case.dim * 2
    moved = 2 * kv + 2 * q.size * 2 + 4 * angle.size * 2.0

    def measure(label: str, write: Any, *heads: jax.Array) -> None:
        turns = time.turns(time.floor(moved))

        def call(state: Any, first: Any, *rest: Any) -> Any:
            (held, k_pool, v_pool), (*others, turn, ragged) = state, rest
            q, k_pool, v_pool = write(first + held[0, 0, 0], *others, turn, k_pool, v_pool, ragged)
            return held.at[0, 0, 0].set(q[0, 0, 0] * 0), k_pool, v_pool

        state = [(jnp.zeros((1, 1, 1), case.dtype), *case.pool(pages, i)) for i in range(case.pools)]
        loop = InPlace(writing(call, turns), state)
        found = time.seconds(loop, (*heads, turn, ragged), turns * case.pools)
        time.add(case.name, label, found, moved=moved)

    with time.each() as attempt:
        attempt(f"{case.name}: mosaic", lambda: measure("mosaic", _write(run.dry), packed(q, *new)))
        attempt(f"{case.name}: xla", lambda: measure("xla", rope_and_write_xla, q, *new))


def _write(dry: bool) -> Any:
    from pallas_kernels.ops.kv_write import hopper as module

    return partial(module.rope_and_write, interpret=interpreter_or_none(dry))


def out_and_in(run: Run) -> None:
    """Time the export of 4096 tokens of 32 layers into a contiguous KV buffer, and the import from it."""
    from pallas_kernels.ops.kv_pages.api import export_pages, import_pages

    time = Timing(run)
    layers, count, page, kv_heads, dim = (2, 2, 16, 2, 64) if time.dry else (32, 64, 64, 8, 128)
    shape = 8 * count, page, kv_heads, dim
    pools = [tuple(normal(shape, jnp.bfloat16, 2 * i + part) for part in (0, 1)) for i in range(layers)]
    moved = 2.0 * 2 * layers * count * page * kv_heads * dim * 2
    draw = np.random.default_rng(0).permutation(8 * count)[: 4 * count].reshape(4, count).astype(np.int32)
    pages = [jnp.asarray(one) for one in draw]
    turns = time.turns(time.floor(moved))

    @jax.jit
    def out(pages: list[jax.Array]) -> jax.Array:
        def body(_: Any, first: jax.Array) -> jax.Array:
            for one in pages:
                kv_buffer = jax.lax.optimization_barrier(export_pages(pools, one + first))
                first = first + (kv_buffer.ravel()[0] * 0).astype(jnp.int32)
            return first

        return jax.lax.fori_loop(0, turns, body, jnp.int32(0))

    time.add("pages 4096 x 32", "export", time.seconds(out, (pages,), 4 * turns), moved=moved)
    kv_buffer = export_pages(pools, pages[0])

    def call(pools: Any, pages: jax.Array, kv_buffer: jax.Array) -> Any:
        return import_pages(pools, pages, kv_buffer)

    loop = InPlace(writing(call, 4 * turns), [pools])
    time.add("pages 4096 x 32", "import", time.seconds(loop, (pages[1], kv_buffer), 4 * turns), moved=moved)
