"""Compile-gate cases of attention as an engine calls it on a TPU: KV write and attention, in place."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention import tpu
from pallas_kernels.gate.cases import Case, shapes, step_shapes
from pallas_kernels.layout import Ragged
from pallas_kernels.ops.paged_attention.api import Attention, AttentionInputs, AttentionSpec
from pallas_kernels.ops.paged_attention.tpu.cases import CONTEXT, DIM, MODELS, POOL
from pallas_kernels.ops.paged_attention.tpu.config import shape_of

SMALL_HEADS, SMALL_DIM = {"gpt-oss": (64, 8), "qwen2.5-0.5b": (14, 2)}, 64  # two heads a row, and one padded head


def cases() -> list[Case]:
    """Return a decode layer of every model, and one layer of a mixed step."""
    layers = [in_place(model, 64, 256, 256, 2**23) for model in MODELS]
    layers += [in_place(model, 64, 256, 256, 2**24) for model in SMALL_HEADS]
    return [*layers, in_place("8b-tp4", 64, 2048, 64, 2**26)]


def in_place(model: str, page: int, tokens: int, rows: int, scratch: int) -> Case:
    """Return a case of one layer that writes to donated pools and attends; no pool may be copied."""
    heads, kv_heads = MODELS.get(model) or SMALL_HEADS[model]
    decode, dim = tokens == rows, DIM if model in MODELS else SMALL_DIM
    spec = AttentionSpec("bfloat16", heads, kv_heads, dim, page, platform="tpu")
    layer, shape = tpu.make(spec, decode), shape_of(spec)
    new = ((tokens, kv_heads, dim), jnp.bfloat16)
    pool = ((POOL // page, page, shape.kv_heads, shape.dim), jnp.bfloat16)
    return Case(
        name=f"tpu layer {model} page{page} {'decode' if decode else 'mixed'}",
        program=partial(_write_and_run, layer=layer),
        arguments=shapes(
            ((tokens, heads, dim), jnp.bfloat16), new, new, pool, pool, *step_shapes(tokens, rows, CONTEXT // page)
        ),
        donate=(3, 4),
        scratch=scratch,
    )


def _write_and_run(
    q: jax.Array, k: jax.Array, v: jax.Array, k_pool: jax.Array, v_pool: jax.Array, *rest: jax.Array, layer: Attention
) -> tuple[jax.Array, ...]:
    inputs = AttentionInputs(q, k, v, None, scale=DIM**-0.5)
    mixed, pool = layer(inputs, (k_pool, v_pool), layer.plan(Ragged.of(rest)))
    return mixed, *pool
