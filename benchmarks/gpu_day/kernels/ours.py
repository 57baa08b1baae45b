"""The attention kernels of this repository, in a form that can be timed: a plan and a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.mosaic import compat
from pallas_kernels.ops.paged_attention import xla as attention_xla

from .cases import Case
from .timing import interpreter_or_none


@dataclass(frozen=True)
class Kernel:
    """A kernel whose `call(q, k_pool, v_pool, ragged, work)` returns [T, H, D], or that and the log-sum-exp."""

    label: str
    plan: Callable[[Ragged], Any]
    call: Callable[..., Any]
    config: Any = None


def scales_of(case: Case) -> Scales | None:
    """Return scales of one for 8-bit pools, whose random values are about one; None for wider pools."""
    if jnp.dtype(case.kv_dtype).itemsize > 1:
        return None
    return Scales(jnp.ones(case.kv_heads), jnp.ones(case.kv_heads))


def xla(case: Case) -> Kernel:
    decode = case.queries == 1

    def call(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged, work: Any) -> jax.Array:
        return attention_xla.paged_attention(
            q, k, v, ragged, scale=case.scale, decode=decode, queries=case.queries, scales=scales_of(case)
        )

    return Kernel("xla", lambda ragged: (), call)


def spec_of(case: Case, *, dry: bool = False) -> Any:
    """Return the spec that the kernels' heuristics use; a dry run has two cores, to save interpreter time."""
    from pallas_kernels.mosaic.spec import CORES, AttentionShape

    shape = len(case.rows), case.heads, case.kv_heads, case.dim, case.page, case.queries, case.dtype, case.kv_dtype
    return AttentionShape(*shape, 2 if dry else CORES)


def decode(case: Case, config: Any, label: str, *, dry: bool) -> Kernel:
    from pallas_kernels.ops.paged_attention.hopper.decode import paged_decode

    return _mosaic(paged_decode, case, config, label, dry)


def prefill(case: Case, config: Any, label: str, *, dry: bool) -> Kernel:
    from pallas_kernels.ops.paged_attention.hopper.prefill import paged_prefill

    return _mosaic(paged_prefill, case, config, label, dry)


def _mosaic(kernel: Callable[..., Any], case: Case, config: Any, label: str, dry: bool) -> Kernel:
    interpret = interpreter_or_none(dry)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged, work: Any) -> Any:
        return kernel(
            q, k, v, ragged, work, scale=case.scale, scales=scales_of(case), config=config, interpret=interpret
        )

    return Kernel(label, lambda ragged: config.plan(ragged, page=case.page), call, config)


def decode_kernels(case: Case, *, dry: bool) -> Iterator[Kernel]:
    """Yield the kernel that an engine would run and, if this jax has both mma and wgmma, the other variant."""
    from pallas_kernels.ops.paged_attention.hopper.decode import WGMMA_ROWS, heuristic

    spec = spec_of(case, dry=dry)
    for warps in (True, False) if compat.HAS_MMA and case.queries * spec.group <= WGMMA_ROWS // 2 else (False,):
        yield decode(case, heuristic(spec, warps=warps), "mosaic " + ("mma" if warps else "wgmma"), dry=dry)


def prefill_kernels(case: Case, *, dry: bool) -> Iterator[Kernel]:
    from pallas_kernels.ops.paged_attention.hopper.prefill import heuristic

    yield prefill(case, heuristic(spec_of(case, dry=dry)), "mosaic", dry=dry)


def registers(kernel: Kernel, case: Case, *, dry: bool) -> Kernel | None:
    """Return the kernel with its weights in registers, which ptxas before 13.3 may miscompile; None if it has none."""
    if not getattr(kernel.config, "p_in_smem", False):
        return None
    make = prefill if "prefill" in type(kernel.config).__module__ else decode
    return make(case, replace(kernel.config, p_in_smem=False), kernel.label + " P in registers", dry=dry)
