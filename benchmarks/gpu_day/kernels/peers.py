"""Time other implementations the same way: torch SDPA, cuDNN through jax, jax's Triton kernel.

Most need contiguous keys per row. They get contiguous keys, and the time to copy them is not counted.
"""

from __future__ import annotations

import time as clock
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_day.part import Run, Skip

from .cases import Case, decode_cases, named, prefill_cases
from .timing import Timing, normal, reading


def _even(case: Case) -> tuple[int, int, int]:
    """Return rows, new tokens and context of a step of equal rows. Raises Skip for other steps."""
    if len(set(case.rows)) != 1:
        raise Skip("rows of different lengths")
    length, context = case.rows[0]
    return len(case.rows), length, context


def jax_attention(time: Timing, case: Case, implementation: str) -> list[float]:
    """Time `jax.nn.dot_product_attention` over contiguous keys."""
    rows, length, context = _even(case)
    if length not in (1, context):
        raise Skip("a chunk after a context needs a mask")
    dtype = jnp.float32 if time.dry else case.dtype  # a dtype that CPUs multiply
    q = normal((rows, length, case.heads, case.dim), dtype, 0)
    shape = rows, context, case.kv_heads, case.dim
    pools = [tuple(normal(shape, dtype, 10 * i + part) for part in (1, 2)) for i in range(case.pools)]

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=length > 1, implementation=implementation)

    turns = time.turns(time.floor(case.moved, case.flops))
    return time.seconds(reading(call, turns), (q, pools, ()), turns * case.pools)


def cudnn_paged(time: Timing, case: Case) -> list[float]:
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

    turns = time.turns(time.floor(case.moved, case.flops))
    return time.seconds(reading(call, turns), (q, pools, (table, *lengths)), turns * case.pools)


def jax_triton(time: Timing, case: Case) -> list[float]:
    """Time jax's Pallas Triton paged attention: pools [K, N, B, D], one query token per row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.11 has no replacement
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if case.queries != 1:
        raise Skip("more than one query token a row")
    ragged, pages = case.ragged()
    # The width of the tables must be divisible by the 16 splits and by the pages per block.
    table = jnp.pad(ragged.block_tables, ((0, 0), (0, -ragged.block_tables.shape[1] % 128)))
    q = case.queries_of() * jnp.asarray(case.scale, case.dtype)
    shape = case.kv_heads, pages, case.page, case.dim
    pools = [tuple(normal(shape, case.dtype, 10 * i + part) for part in (1, 2)) for i in range(case.pools)]

    def call(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return paged_attention(q, k, v, table, lengths, interpret=time.dry)

    turns = time.turns(time.floor(case.moved, case.flops))
    return time.seconds(reading(call, turns), (q, pools, (table, ragged.contexts)), turns * case.pools)


def torch_sdpa(time: Timing, case: Case, backend: str) -> list[float]:
    """Time one backend of `torch.nn.functional.scaled_dot_product_attention` over contiguous keys."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    rows, length, context = _even(case)
    device = "cpu" if time.dry else "cuda"
    dtype = torch.float16 if case.dtype == jnp.float16 else torch.bfloat16

    def made(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=dtype)

    q = made(rows, case.heads, length, case.dim)
    pools = [[made(rows, case.kv_heads, context, case.dim) for _ in "kv"] for _ in range(case.pools)]
    mask = causal_lower_right(length, context) if 1 < length < context else None
    turns = time.turns(time.floor(case.moved, case.flops))

    def run() -> None:
        for _ in range(turns):
            for k, v in pools:
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=length == context > 1, enable_gqa=case.heads != case.kv_heads
                )
        if device == "cuda":
            torch.cuda.synchronize()

    kind = SDPBackend.MATH if time.dry else getattr(SDPBackend, backend)
    with torch.inference_mode(), sdpa_kernel(kind):
        found = _timed(run, time, turns * case.pools)
    if device == "cuda":
        del q, pools
        torch.cuda.empty_cache()  # jax needs the memory
    return found


def _timed(run: Callable[[], None], time: Timing, calls: int) -> list[float]:
    run()
    found = []
    for _ in range(2):
        times = []
        for _ in range(1 if time.dry else time.samples):
            began = clock.perf_counter()
            run()
            times.append(clock.perf_counter() - began)
        found.append(median(times) / calls)
    return found


def flashinfer(time: Timing, case: Case) -> list[float]:
    """Time FlashInfer's paged decode, planned once as an engine does."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    rows, length, context = _even(case)
    if length != 1:
        raise Skip("only decode is compared with FlashInfer")
    per_row, dtype = -(-context // case.page), torch.bfloat16
    shape = rows * per_row, case.page, case.kv_heads, case.dim
    pools = [tuple(torch.randn(*shape, device="cuda", dtype=dtype) for _ in "kv") for _ in range(case.pools)]
    q = torch.randn(rows, case.heads, case.dim, device="cuda", dtype=dtype)
    order = torch.randperm(rows * per_row, device="cuda", dtype=torch.int32)
    starts = torch.arange(0, rows * per_row + 1, per_row, device="cuda", dtype=torch.int32)
    last = torch.full((rows,), context - (per_row - 1) * case.page, device="cuda", dtype=torch.int32)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD")
    wrapper.plan(starts, order, last, case.heads, case.kv_heads, case.dim, case.page, q_data_type=dtype)
    turns = time.turns(time.floor(case.moved, case.flops))

    def run() -> None:
        for _ in range(turns):
            for pool in pools:
                wrapper.run(q, pool)
        torch.cuda.synchronize()

    return _timed(run, time, turns * case.pools)


def tokamax(time: Timing, case: Case) -> list[float]:
    """Time tokamax's attention over contiguous keys."""
    from tokamax import dot_product_attention

    rows, length, context = _even(case)
    if length != context:
        raise Skip("only whole prompts are compared with tokamax")
    q = normal((rows, length, case.heads, case.dim), case.dtype, 0)
    shape = rows, context, case.kv_heads, case.dim
    pools = [tuple(normal(shape, case.dtype, 10 * i + part) for part in (1, 2)) for i in range(case.pools)]

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out: jax.Array = dot_product_attention(q, k, v, is_causal=True, implementation="mosaic")
        return out

    turns = time.turns(time.floor(case.moved, case.flops))
    return time.seconds(reading(call, turns), (q, pools, ()), turns * case.pools)


PEERS: dict[str, Callable[[Timing, Case], list[float]]] = {
    "jax cudnn": lambda time, case: jax_attention(time, case, "xla" if time.dry else "cudnn"),
    "jax triton paged": jax_triton,
    "cudnn paged": cudnn_paged,
    "torch sdpa flash": lambda time, case: torch_sdpa(time, case, "FLASH_ATTENTION"),
    "torch sdpa cudnn": lambda time, case: torch_sdpa(time, case, "CUDNN_ATTENTION"),
    "flashinfer": flashinfer,
    "tokamax": tokamax,
}


def measure(run: Run, peer: str, cases: list[str]) -> None:
    """Time one peer on cases with equal rows and an unquantized pool."""
    time = Timing(run)
    with time.each() as attempt:
        for case in named([*decode_cases(run.dry), *prefill_cases(run.dry)], cases):
            found = attempt(f"{case.name}: {peer}", lambda case=case: PEERS[peer](time, case))
            if found is not None:
                time.add(case.name, peer, found, moved=case.moved, flops=case.flops)
