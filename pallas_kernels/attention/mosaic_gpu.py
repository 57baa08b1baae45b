"""Attention on NVIDIA Hopper by Mosaic GPU kernels: RoPE and KV write, then decode and prefill, merged by token.

A step with prompts computes rows of one token by the decode kernel and longer rows by the prefill
kernel; each row is in exactly one of the two plans. A step without prompts has rows of up to
QUERIES tokens, all in the decode kernel. The prefill kernel does not support 8-bit pools of head
dim 256: steps with prompts run in XLA.

If a step names groups of rows with a common prefix, another launch reads the pages that each group
shares, and both kernels read the rest (ops/paged_attention/cascade.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.attention.xla import XlaAttention, XlaWork
from pallas_kernels.layout import Ragged
from pallas_kernels.mosaic.spec import why_not
from pallas_kernels.mosaic.support import interpreter_of, unfit
from pallas_kernels.ops.mla import api as mla
from pallas_kernels.ops.paged_attention.api import Attention, AttentionInputs, AttentionSpec, Pool
from pallas_kernels.ops.paged_attention.cascade import merge
from pallas_kernels.ops.paged_attention.sinks import with_sinks

QUERIES = 16  # tokens of the longest row of a step without prompts
PAGES = (16, 32, 64, 128, 256)
# `queries` of the specs whose tuned configs are looked up, by op: rows of one token, rows that verify drafted tokens
LOOKED_UP = {"decode": (1, QUERIES), "prefill": (1,)}


class GpuAttentionWork(NamedTuple):
    """The plans that all layers of a step share."""

    ragged: Ragged
    decode: tuple[Any, ...]  # one DecodeWork per window
    prefill: tuple[Any, ...]  # one PrefillWork per window; empty in a step without prompts
    xla: XlaWork | None = None  # instead, if the step runs in XLA
    groups: tuple[Any, ...] = ()  # one Groups per window; empty if the step has no `Ragged.shared`


def supports(spec: AttentionSpec) -> str | None:
    """Return None, or the reason why the kernels cannot run `spec`."""
    return unfit(spec) or _refused(spec)


def make(spec: AttentionSpec | None, decode: bool, few: bool = False) -> Attention:
    """Build the attention of a bucket.

    `decode`: every program row is one token. `few`: no row has more than QUERIES tokens. Either
    flag leaves out the prefill kernel.
    """
    assert spec is not None, "the kernels need a spec"
    return mla.MlaAttention(spec, decode) if spec.latent else MosaicAttention(spec, decode, few)


def tuning_specs(spec: AttentionSpec) -> list[tuple[str, Any]]:
    """Return the (op, AttentionShape) of every tuned config that the attention of `spec` looks up."""
    return [(op, spec.shape(queries)) for op, several in LOOKED_UP.items() for queries in several]


def _refused(spec: AttentionSpec) -> str | None:
    """Return None, or the reason why a step shape that is not left to XLA has no valid config."""
    if spec.page not in PAGES:
        return f"pages of {spec.page} tokens; it reads pages of {', '.join(map(str, PAGES))}"
    if spec.latent:
        return mla.refused(spec)
    configs = [(_decode(spec, queries), queries) for queries in LOOKED_UP["decode"]]
    if not _left_to_xla(spec):
        configs.append((_prefill(spec), 1))
    return next((why for config, queries in configs if (why := why_not(config, spec.shape(queries)))), None)


def _left_to_xla(spec: AttentionSpec) -> bool:
    """Return whether prefill runs in XLA: 8-bit pools of head dim 256 would spill registers."""
    return spec.head_dim > 128 and jnp.dtype(spec.stored).itemsize == 1


def _config(op: str, kernel: ModuleType, spec: AttentionSpec, queries: int) -> Any:
    assert queries in LOOKED_UP[op], f"{queries=} of {op} must be in tuning_specs"
    return tuned.chosen(op, kernel, spec.shape(queries), spec)


def _decode(spec: AttentionSpec, queries: int) -> Any:
    from pallas_kernels.ops.paged_attention.hopper import decode

    return _config("decode", decode, spec, queries)


def _prefill(spec: AttentionSpec) -> Any:
    from pallas_kernels.ops.paged_attention.hopper import prefill

    return replace(_config("prefill", prefill, spec, *LOOKED_UP["prefill"]), above=1)


@dataclass(frozen=True)
class MosaicAttention:
    """Attention of one bucket by the Hopper kernels."""

    spec: AttentionSpec
    decode: bool
    few: bool = False

    @property
    def _by_xla(self) -> bool:
        return self._prefills and _left_to_xla(self.spec)

    @property
    def _xla(self) -> XlaAttention:
        return XlaAttention(self.decode, windows=self.spec.windows)

    @property
    def _prefills(self) -> bool:
        """Whether rows may be prompts."""
        return not (self.decode or self.few)

    @property
    def _queries(self) -> int:
        return QUERIES if self.few and not self.decode else 1

    def plan(self, ragged: Ragged) -> GpuAttentionWork:
        """Plan the step once per distinct window; layers with the same window share a plan."""
        if self._by_xla:
            return GpuAttentionWork(ragged, (), (), self._xla.plan(ragged))
        windows, page = self.spec.windows, self.spec.page
        groups = tuple(self._groups(ragged, window) for window in windows if ragged.shared is not None)
        steps = [each.cascade.rest for each in groups] or [ragged] * len(windows)

        def each(config: Any) -> tuple[Any, ...]:
            return tuple(config.plan(step, page=page, window=each) for step, each in zip(steps, windows, strict=True))

        prefill = each(_prefill(self.spec)) if self._prefills else ()
        return GpuAttentionWork(ragged, each(_decode(self.spec, self._queries)), prefill, groups=groups)

    def _groups(self, ragged: Ragged, window: int | None) -> Any:
        from pallas_kernels.ops.paged_attention.hopper import cascade

        return cascade.plan(ragged, _decode(self.spec, QUERIES), page=self.spec.page, window=window)

    def __call__(self, inputs: AttentionInputs, pool: Pool, work: GpuAttentionWork) -> tuple[jax.Array, Pool]:
        from pallas_kernels.ops.kv_write.hopper import packed, rope_and_write
        from pallas_kernels.ops.paged_attention.hopper.decode import paged_decode

        qkv, norms, interpret = inputs.qkv, inputs.norms, interpreter_of(self.spec)
        if qkv is None:  # all of the norms are applied
            assert inputs.v is not None, "MlaAttention handles latents"
            qkv, norms = packed(inputs.q, inputs.k, inputs.v), None
        k_pool, v_pool = pool
        q, k_pool, v_pool = rope_and_write(
            qkv, inputs.turn, k_pool, v_pool, work.ragged, scales=inputs.scales, norms=norms, interpret=interpret
        )
        if work.xla is not None:
            return self._xla.attend(q, (k_pool, v_pool), work.xla, inputs), (k_pool, v_pool)
        at, sinks = self.spec.windows.index(inputs.window), inputs.sinks
        rest: dict[str, Any] = {**inputs.options, "interpret": interpret}
        groups = work.groups[at] if work.groups else None
        ragged = work.ragged if groups is None else groups.cascade.rest
        config = _decode(self.spec, self._queries)
        # Every row is in one of the plans, so what decode leaves out is overwritten.
        mixed, lse = paged_decode(q, k_pool, v_pool, ragged, work.decode[at], config=config, clean=False, **rest)
        if self._prefills:
            from pallas_kernels.ops.paged_attention.hopper.prefill import paged_prefill

            config = _prefill(self.spec)
            longer = paged_prefill(q, k_pool, v_pool, ragged, work.prefill[at], config=config, clean=False, **rest)
            mine = work.prefill[at].place >= 0
            mixed = jnp.where(mine[:, None, None], longer[0], mixed)
            lse = jnp.where(mine[:, None], longer[1], lse)
        if groups is not None:
            from pallas_kernels.ops.paged_attention.hopper.cascade import attend_shared

            config = _decode(self.spec, QUERIES)
            mixed, lse = merge(*attend_shared(q, k_pool, v_pool, groups, config=config, **rest), mixed, lse)
        return (mixed if sinks is None else with_sinks(mixed, lse, sinks)), (k_pool, v_pool)
