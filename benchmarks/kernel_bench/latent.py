"""Time MLA attention by the kernel and by XLA: steps of one layer of DeepSeek-V2-Lite and V3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged
from pallas_kernels.mosaic import compat
from pallas_kernels.ops.paged_attention import xla as attention_xla

from .cases import Case
from .session import Session, normal, reading


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


def cases(dry: bool) -> list[Latent]:
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


def times(session: Session) -> None:
    for case in cases(session.dry):
        for label in _labels(case):
            found = session.part(
                f"{case.name}: {label}", lambda case=case, label=label: _measure(session, case, label), least=5.0
            )
            if found is not None:
                seconds, config = found
                session.add(case.name, label, seconds, moved=case.moved, flops=case.flops, config=config)


def _labels(case: Latent) -> list[str]:
    if jnp.dtype(case.kv_dtype).itemsize == 1:  # 8-bit latents have one kernel form
        return ["mosaic mma", "xla"]
    few = compat.HAS_MMA and case.queries * case.heads <= 16
    return [*(["mosaic mma"] if few else []), "mosaic wgmma", "xla"]


def _measure(session: Session, case: Latent, label: str) -> tuple[Any, str]:
    from pallas_kernels.mosaic.interpret import interpreter
    from pallas_kernels.mosaic.spec import CORES, AttentionShape
    from pallas_kernels.ops.mla import hopper as latent

    if session.dry and label != "xla" and not compat.DETECTS_RACES:
        raise NotImplementedError(f"a dry run needs the interpreter of jax 0.11; this is {jax.__version__}")
    spec = AttentionShape(
        len(case.rows), case.heads, 1, case.dim, case.page, case.queries, case.dtype, case.kv_dtype,
        2 if session.dry else CORES, case.values,
    )  # fmt: skip
    config = latent.heuristic(spec, warps=label == "mosaic mma")
    interpret = interpreter() if session.dry else None
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
    least = max(case.moved / session.ceilings.copy, case.flops / session.ceilings.matmul)
    turns = 1 if label == "xla" else session.turns(least)
    seconds = session.seconds(reading(call, turns), (case.queries_of(), pools, (ragged, work)), turns * case.pools)
    return seconds, "" if label == "xla" else str(config)
