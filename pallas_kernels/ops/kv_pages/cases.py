"""Compile-gate cases of page export and import."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes
from pallas_kernels.ops.kv_pages.api import Pool, export_pages, import_pages


def cases() -> list[Case]:
    """Return exports and imports of 64 pages of Llama-3-8B, with few layers, as all layers compile alike."""
    return [case for dtype in (jnp.bfloat16, jnp.float8_e4m3fn) for case in _cases(dtype, layers=4, moved=64)]


def _cases(dtype: jnp.dtype, layers: int, moved: int) -> list[Case]:
    pool = ((4096, 64, 8, 128), dtype)
    name, flat = f"{jnp.dtype(dtype).name} m{moved}", [pool] * (2 * layers)
    where, kv_buffer = ((moved,), jnp.int32), ((layers, 2, moved, 64, 8, 128), dtype)
    return [
        Case(f"export_pages {name}", _export, shapes(where, *flat)),
        Case(f"import_pages {name}", _import, shapes(where, kv_buffer, *flat), donate=tuple(range(2, 2 + len(flat)))),
    ]


def _pairs(flat: Sequence[jax.Array]) -> list[Pool]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _export(pages: jax.Array, *flat: jax.Array) -> jax.Array:
    return export_pages(_pairs(flat), pages)


def _import(pages: jax.Array, kv_buffer: jax.Array, *flat: jax.Array) -> list[Pool]:
    return import_pages(_pairs(flat), pages, kv_buffer)
