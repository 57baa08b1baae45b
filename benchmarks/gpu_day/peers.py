"""Time other implementations of attention in the same way: torch's and cuDNN's, over contiguous keys."""

from __future__ import annotations

import time as clock
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from .part import Run, Skip
from .shapes import Case, cases
from .timing import Headline, Timing, normal

CASES = ("decode B64 ctx4096", "prefill 8192")
TORCH = {"torch sdpa flash": "FLASH_ATTENTION", "torch sdpa cudnn": "CUDNN_ATTENTION"}


def measure(run: Run) -> None:
    """Time each peer in each case, as items of the part."""
    time, found = Timing(run), [cases(run.dry)[name] for name in CASES]
    run.each(
        {f"{case.name}: {peer}": partial(torch_sdpa, time, case, peer) for case in found for peer in TORCH}
        | {f"{case.name}: jax cudnn": partial(time.measure, jax_cudnn(case, run.dry)) for case in found}
    )


def jax_cudnn(case: Case, dry: bool) -> Headline:
    """Return `jax.nn.dot_product_attention` by cuDNN."""
    rows, (length, context) = len(case.rows), case.rows[0]
    dtype = jnp.float32 if dry else case.dtype  # a dtype that CPUs multiply

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=length > 1, implementation="xla" if dry else "cudnn")

    def make() -> Any:
        shape = rows, context, case.kv_heads, case.dim
        pools = [tuple(normal(shape, dtype, 10 * i + part) for part in (1, 2)) for i in range(case.pools)]
        return normal((rows, length, case.heads, case.dim), dtype, 0), pools, ()

    return Headline(case.name, "jax cudnn", call, make, case.moved, case.flops)


def torch_sdpa(time: Timing, case: Case, peer: str) -> None:
    """Time one backend of `torch.nn.functional.scaled_dot_product_attention`."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError as error:
        raise Skip(f"torch: {error}") from None
    rows, (length, context) = len(case.rows), case.rows[0]
    device = "cpu" if time.dry else "cuda"

    def made(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.float32 if time.dry else torch.bfloat16)

    q = made(rows, case.heads, length, case.dim)
    pools = [[made(rows, case.kv_heads, context, case.dim) for _ in "kv"] for _ in range(case.pools)]
    turns = time.turns(time.floor(case.moved, case.flops))

    def calls() -> None:
        for _ in range(turns):
            for k, v in pools:
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=length > 1, enable_gqa=case.heads != case.kv_heads
                )
        if device == "cuda":
            torch.cuda.synchronize()

    kind = SDPBackend.MATH if time.dry else getattr(SDPBackend, TORCH[peer])
    found = []
    with torch.inference_mode(), sdpa_kernel(kind):
        calls()
        for _ in range(2):
            times = []
            for _ in range(1 if time.dry else time.samples):
                began = clock.perf_counter()
                calls()
                times.append(clock.perf_counter() - began)
            found.append(median(times) / (turns * case.pools))
    time.add(case.name, peer, found, moved=case.moved, flops=case.flops)
    if device == "cuda":
        del q, pools
        torch.cuda.empty_cache()  # jax needs the memory
