"""What the compile gate compiles of the TPU kernels: a layer's plan and attention, at the shapes that are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.cases import Case, shapes
from pallas_kernels.backends import tpu
from pallas_kernels.backends.base import Attention, Spec
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.tpu.config import Config, Shape, shape_of
from pallas_kernels.tpu.kernel import paged_attention
from pallas_kernels.tpu.plan import Work

MODELS = {"8b": (32, 8), "8b-tp4": (8, 2)}  # H, K of a shard of Llama 3
DIM = 128
NARROW, NARROW_DIM = {"gpt-oss": (64, 8), "qwen2.5-0.5b": (14, 2)}, 64  # two heads a row, and one that is padded
POOL, CONTEXT = 2**19, 2**17  # tokens of a layer's pool, and of the longest row


@dataclass(frozen=True)
class Layer:
    """One case."""

    kind: str  # decode or prefill
    model: str
    page: int
    tokens: int
    rows: int
    stored: str = "bfloat16"  # dtype of the pools
    note: str = ""
    usual: bool = True

    @property
    def shape(self) -> Shape:
        heads, kv_heads = MODELS[self.model]
        return Shape(heads, kv_heads, DIM, self.page, pool_bytes=jnp.dtype(self.stored).itemsize)

    def case(self, config: Config, plan: Callable[[Ragged], Work], **options: Any) -> Case:
        quantised = "" if self.stored == "bfloat16" else f" {self.stored}"
        return Case(
            name=f"tpu {self.kind} {self.model}{quantised} page{self.page}{self.note}",
            program=partial(_run, plan=plan, config=config, **options),
            arguments=self._arguments(),
            usual=self.usual,
        )

    def _arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, the pools, the fields of `Ragged`, and scales where pools are quantised."""
        shape = self.shape
        pool = (POOL // self.page, self.page, shape.kv_heads, DIM)
        scales = [] if self.stored == "bfloat16" else [((shape.kv_heads,), jnp.float32)] * 2
        return shapes(
            ((self.tokens, shape.heads, DIM), jnp.bfloat16),
            *[(pool, self.stored)] * 2,
            *_step(self.tokens, self.rows, self.page),
            *scales,
        )


def in_place(model: str, page: int, tokens: int, rows: int, scratch: int) -> Case:
    """A layer's attention as an engine calls it, writing to its donated pools first: none of them may be copied."""
    heads, kv_heads = MODELS.get(model) or NARROW[model]
    decode, dim = tokens == rows, DIM if model in MODELS else NARROW_DIM
    spec = Spec("bfloat16", heads, kv_heads, dim, page, platform="tpu")
    layer, shape = tpu.make(spec, decode), shape_of(spec)
    new = ((tokens, kv_heads, dim), jnp.bfloat16)
    pool = ((POOL // page, page, shape.kv_heads, shape.dim), jnp.bfloat16)
    return Case(
        name=f"tpu layer {model} page{page} {'decode' if decode else 'mixed'}",
        program=partial(_write_and_run, layer=layer),
        arguments=shapes(((tokens, heads, dim), jnp.bfloat16), new, new, pool, pool, *_step(tokens, rows, page)),
        donate=(3, 4),
        scratch=scratch,
    )


def _step(tokens: int, rows: int, page: int) -> list[tuple[tuple[int, ...], Any]]:
    """The fields of `Ragged`."""
    return [*[((tokens,), jnp.int32)] * 3, *[((rows,), jnp.int32)] * 3, ((rows, CONTEXT // page), jnp.int32)]


def _write_and_run(
    q: jax.Array, k: jax.Array, v: jax.Array, k_pool: jax.Array, v_pool: jax.Array, *rest: jax.Array, layer: Attention
) -> tuple[jax.Array, ...]:
    mixed, pool = layer(q, k, v, None, (k_pool, v_pool), layer.plan(Ragged(*rest)), scale=DIM**-0.5)
    return mixed, *pool


def _run(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *rest: jax.Array,
    plan: Callable[[Ragged], Work],
    config: Config,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    fields = len(Ragged._fields)
    ragged, scales = Ragged(*rest[:fields]), Scales(*rest[fields:]) if len(rest) > fields else None
    return paged_attention(
        q, k_pool, v_pool, ragged, plan(ragged), scale=DIM**-0.5, scales=scales, config=config, **options
    )
