"""Time MLA attention by the kernel and by XLA: steps of one layer of DeepSeek-V2-Lite and V3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_day.part import Run
from pallas_kernels.layout import Ragged
from pallas_kernels.mosaic import compat
from pallas_kernels.ops.paged_attention import xla as attention_xla

from .cases import Case
from .timing import Timing, interpreter_or_none, normal, reading


@dataclass(frozen=True)
class Latent(Case):
    """A step whose cache holds latents of `dim` columns, the first `values` of which are the values."""

    values: int = 512  # R

    @property
    def moved(self) -> float:
        """Bytes that a kernel must move: latents once per row, queries in, attention outputs out."""
        latents = sum(context for _, context in self.rows) * self.dim * jnp.dtype(self.kv_dtype).itemsize
        return float(latents + self.tokens * self.heads * (self.dim + self.values) * 2)

    @property
    def flops(self) -> float:
        """FLOPs of both matmuls over the latents that each token attends to."""
        seen = sum(length * context - length * (length - 1) // 2 for length, context in self.rows)
        return 2.0 * seen * self.heads * (self.dim + self.values)


def all_cases(dry: bool) -> list[Latent]:
    if dry:
        small = Latent("latent B2", ((1, 37), (3, 20)), 16, 4, 1, 192, jnp.float16, pools=2, values=128)
        return [small, replace(small, name="latent B2 int8", pool_dtype=jnp.int8)]
    found = [
        Latent(f"latent B64 ctx4096 H{heads}", ((1, 4096),) * 64, 64, heads, 1, 576) for heads in (16, 32, 64, 128)
    ]
    found.append(Latent("latent B1 ctx131072 H16", ((1, 131072),), 64, 16, 1, 576))
    found.append(Latent("latent B64 ctx4096 H16 T4", ((4, 4096),) * 64, 64, 16, 1, 576))
    found.append(Latent("latent prompts 2x4096 H16", ((4096, 4096),) * 2, 64, 16, 1, 576))
    narrow = [replace(case, name=f"{case.name} e4m3", pool_dtype=jnp.float8_e4m3fn) for case in found]
    return [*found, *narrow, replace(found[0], name=f"{found[0].name} int8", pool_dtype=jnp.int8)]


def measure(run: Run, cases: list[str]) -> None:
    """Time the cases of these names."""
    time = Timing(run)
    known = {case.name: case for case in all_cases(run.dry)}
    with time.each() as attempt:
        for name in cases:
            for label in _labels(known[name]):
                attempt(f"{name}: {label}", lambda case=known[name], label=label: _measure(time, case, label))


def _labels(case: Latent) -> list[str]:
    if jnp.dtype(case.kv_dtype).itemsize == 1:  # 8-bit latents have one kernel form
        return ["mosaic mma", "xla"]
    few = compat.HAS_MMA and case.queries * case.heads <= 16
    return [*(["mosaic mma"] if few else []), "mosaic wgmma", "xla"]


def _measure(time: Timing, case: Latent, label: str) -> None:
    from pallas_kernels.mosaic.spec import CORES, AttentionShape
    from pallas_kernels.ops.mla import hopper as latent

    interpret = interpreter_or_none(time.dry) if label != "xla" else None
    spec = AttentionShape(
        len(case.rows), case.heads, 1, case.dim, case.page, case.queries, case.dtype, case.kv_dtype,
        2 if time.dry else CORES, case.values,
    )  # fmt: skip
    config = latent.heuristic(spec, warps=label == "mosaic mma")
    ragged, pages = case.ragged()

    def call(q: jax.Array, pool: jax.Array, ragged: Ragged, work: Any) -> Any:
        if label == "xla":
            return attention_xla.paged_attention(
                q, pool, pool, ragged, scale=case.scale, decode=case.queries == 1, queries=case.queries
            )
        return latent.paged_mla(q, pool, work, values=case.values, scale=case.scale, config=config, interpret=interpret)

    short = case.queries <= config.queries
    work = () if label == "xla" else jax.jit(lambda step: config.plan(step, page=case.page, short=short))(ragged)
    shape = pages, case.page, 1, case.dim
    pools = [(normal(shape, case.kv_dtype, 1 + i),) for i in range(case.pools)]
    turns = 1 if label == "xla" else time.turns(time.floor(case.moved, case.flops))
    found = time.seconds(reading(call, turns), (case.queries_of(), pools, (ragged, work)), turns * case.pools)
    told = "" if label == "xla" else str(config)
    time.add(case.name, label, found, moved=case.moved, flops=case.flops, config=told)
