"""Time other implementations the same way: torch SDPA, cuDNN through jax, jax's Triton kernel.

Most need contiguous keys per row. They get contiguous keys, and the time to copy them is not counted.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from .cases import Case
from .session import Session, normal, reading


def _even(case: Case) -> tuple[int, int, int]:
    """Return rows, new tokens and context of a step of equal rows. Raises NotImplementedError for other steps."""
    if len(set(case.rows)) != 1:
        raise NotImplementedError("rows of different lengths")
    length, context = case.rows[0]
    return len(case.rows), length, context


def jax_attention(session: Session, case: Case, implementation: str) -> list[float]:
    """Time `jax.nn.dot_product_attention` over contiguous keys."""
    rows, length, context = _even(case)
    if length not in (1, context):
        raise NotImplementedError("a chunk after a context needs a mask")
    dtype = jnp.float32 if session.dry else case.dtype  # a dtype that CPUs multiply
    q = normal((rows, length, case.heads, case.dim), dtype, 0)
    shape = rows, context, case.kv_heads, case.dim
    pools = [tuple(normal(shape, dtype, 10 * i + part) for part in (1, 2)) for i in range(case.pools)]

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=length > 1, implementation=implementation)

    turns = session.turns(least(session, case))
    return session.seconds(reading(call, turns), (q, pools, ()), turns * case.pools)


def cudnn_paged(session: Session, case: Case) -> list[float]:
    """Time cuDNN's paged attention by jax's private binding, which needs a pool of exactly the rows' pages."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    rows, length, context = _even(case)
    per_row = -(-context // case.page)
    q = normal((rows, length, case.heads, case.dim), case.dtype, 0)
    pools = [case.pool(rows * per_row, 1 + i) for i in range(case.pools)]
    order = jax.random.permutation(jax.random.key(0), rows * per_row).astype(jnp.int32)
    table = order.reshape(rows, 1, per_row, 1)
    lengths = jnp.full(rows, length, jnp.int32), jnp.full(rows, context, jnp.int32)
    mask = MaskType.PADDING_CAUSAL if length > 1 else MaskType.PADDING

    def call(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, new: jax.Array, seen: jax.Array) -> Any:
        return paged_attention(q, k, v, new, seen, table, table, scale=case.scale, mask_type=mask)

    turns = session.turns(least(session, case))
    return session.seconds(reading(call, turns), (q, pools, (table, *lengths)), turns * case.pools)


def jax_triton(session: Session, case: Case) -> list[float]:
    """Time jax's Pallas Triton paged attention: pools [K, N, B, D], one query token per row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.11 has no replacement
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if case.queries != 1:
        raise NotImplementedError("more than one query token a row")
    ragged, pages = case.ragged()
    # The width of the tables must be divisible by the 16 splits and by the pages per block.
    table = jnp.pad(ragged.block_tables, ((0, 0), (0, -ragged.block_tables.shape[1] % 128)))
    q = case.queries_of() * jnp.asarray(case.scale, case.dtype)
    shape = case.kv_heads, pages, case.page, case.dim
    pools = [tuple(normal(shape, case.dtype, 10 * i + part) for part in (1, 2)) for i in range(case.pools)]

    def call(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return paged_attention(q, k, v, table, lengths, interpret=session.dry)

    turns = session.turns(least(session, case))
    return session.seconds(reading(call, turns), (q, pools, (table, ragged.contexts)), turns * case.pools)


def torch_sdpa(session: Session, case: Case, backend: str) -> list[float]:
    """Time one backend of `torch.nn.functional.scaled_dot_product_attention` over contiguous keys."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    rows, length, context = _even(case)
    device = "cpu" if session.dry else "cuda"
    dtype = torch.float16 if case.dtype == jnp.float16 else torch.bfloat16

    def made(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=dtype)

    q = made(rows, case.heads, length, case.dim)
    pools = [[made(rows, case.kv_heads, context, case.dim) for _ in "kv"] for _ in range(case.pools)]
    mask = causal_lower_right(length, context) if 1 < length < context else None
    turns = session.turns(least(session, case))

    def run() -> None:
        for _ in range(turns):
            for k, v in pools:
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=length == context > 1, enable_gqa=case.heads != case.kv_heads
                )
        if device == "cuda":
            torch.cuda.synchronize()

    kind = SDPBackend.MATH if session.dry else getattr(SDPBackend, backend)
    with torch.inference_mode(), sdpa_kernel(kind):
        found = _timed(run, session, turns * case.pools)
    if device == "cuda":
        del q, pools
        torch.cuda.empty_cache()  # jax needs the memory
    return found


def _timed(run: Callable[[], None], session: Session, calls: int) -> list[float]:
    run()
    found = []
    for _ in range(2):
        times = []
        for _ in range(1 if session.dry else session.samples):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        found.append(median(times) / calls)
    return found


def least(session: Session, case: Case) -> float:
    """Return the seconds that no kernel can beat, or 1 ms if a ceiling could not be measured."""
    floors = case.moved / session.ceilings.copy, case.flops / session.ceilings.matmul
    return 1e-3 if any(map(math.isnan, floors)) else max(floors)


def measure(session: Session, case: Case, *, decode: bool, reserve: float) -> None:
    """Time every peer that supports the case, while more than `reserve` seconds are left."""
    todo: dict[str, Callable[[], list[float]]] = {}
    if decode:
        todo["jax triton paged"] = lambda: jax_triton(session, case)
    todo["cudnn paged"] = lambda: cudnn_paged(session, case)
    if "page" not in case.name:  # contiguous keys have no page size
        todo["torch sdpa flash"] = lambda: torch_sdpa(session, case, "FLASH_ATTENTION")
        todo["torch sdpa cudnn"] = lambda: torch_sdpa(session, case, "CUDNN_ATTENTION")
        todo["jax cudnn"] = lambda: jax_attention(session, case, "xla" if session.dry else "cudnn")
    for label, work in todo.items():
        found = session.part(f"{case.name}: {label}", work, least=reserve)
        if found is not None:
            session.add(case.name, label, found, moved=case.moved, flops=case.flops)
