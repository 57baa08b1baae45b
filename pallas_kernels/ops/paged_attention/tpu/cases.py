"""Compile-gate cases of paged attention for TPU: a plan and its kernel, at the shapes of served models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes, step_shapes
from pallas_kernels.layout import ARRAYS, Ragged, Scales
from pallas_kernels.ops.paged_attention.tpu.config import Config, TpuShape, decode_config, prefill_config
from pallas_kernels.ops.paged_attention.tpu.kernel import paged_attention
from pallas_kernels.ops.paged_attention.tpu.plan import WorkItems, plan_decode, plan_prefill

MODELS = {"8b": (32, 8), "8b-tp4": (8, 2)}  # H, K of a shard of Llama 3
DIM = 128
POOL, CONTEXT = 2**19, 2**17  # tokens of a layer's pool, and of the longest row


@dataclass(frozen=True)
class Layer:
    """The shapes of one case."""

    kind: str  # decode or prefill
    model: str
    page: int
    tokens: int
    rows: int
    stored: str = "bfloat16"  # dtype of the pools
    note: str = ""
    usual: bool = True

    @property
    def shape(self) -> TpuShape:
        heads, kv_heads = MODELS[self.model]
        return TpuShape(heads, kv_heads, DIM, self.page, pool_bytes=jnp.dtype(self.stored).itemsize)

    def case(self, config: Config, plan: Callable[[Ragged], WorkItems], **options: Any) -> Case:
        quantized = "" if self.stored == "bfloat16" else f" {self.stored}"
        return Case(
            name=f"tpu {self.kind} {self.model}{quantized} page{self.page}{self.note}",
            program=partial(_run, plan=plan, config=config, **options),
            arguments=self._arguments(),
            usual=self.usual,
        )

    def _arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the arguments: q, the pools, the fields of `Ragged`, and scales of quantized pools."""
        shape = self.shape
        pool = (POOL // self.page, self.page, shape.kv_heads, DIM)
        scales = [] if self.stored == "bfloat16" else [((shape.kv_heads,), jnp.float32)] * 2
        return shapes(
            ((self.tokens, shape.heads, DIM), jnp.bfloat16),
            *[(pool, self.stored)] * 2,
            *step_shapes(self.tokens, self.rows, CONTEXT // self.page),
            *scales,
        )


def cases() -> list[Case]:
    """Return the cases of single kernels; `attention/cases.py` has whole layers."""
    return [*decode_cases(), *prefill_cases()]


def decode_cases() -> list[Case]:
    """Return the decode cases: pages, pools and query tokens of served models."""
    cases: list[Case] = []
    for model in MODELS:
        cases += [_decode_case(model, page) for page in (16, 64, 256)]
        cases += [_decode_case(model, 64, queries, usual=queries == 16) for queries in (4, 16)]
    for stored in ("int8", "float8_e4m3fn"):
        cases += [_decode_case("8b", 64, 1, stored), _decode_case("8b", 64, 16, stored, usual=False)]
    layer = Layer("decode", "8b", 64, 64, 64, note=" q1 window softcap")
    cases.append(layer.case(decode_config(layer.shape), partial(plan_decode, queries=1), window=4096, softcap=50.0))
    return cases


def _decode_case(model: str, page: int, queries: int = 1, stored: str = "bfloat16", usual: bool = True) -> Case:
    layer = Layer("decode", model, page, 64 * queries, 64, stored, f" q{queries}", usual)
    return layer.case(decode_config(layer.shape, queries), partial(plan_decode, queries=queries))


def prefill_cases() -> list[Case]:
    """Return the prefill cases: pages and pools of served models."""
    cases: list[Case] = []
    for model in MODELS:
        cases += [_prefill_case(model, page, usual=page != 64) for page in (16, 64, 256)]
    cases += [_prefill_case("8b", 64, "int8"), _prefill_case("8b", 64, "float8_e4m3fn", usual=False)]
    layer = Layer("prefill", "8b", 64, 2048, 16, note=" window softcap", usual=False)
    config = prefill_config(layer.shape)
    plan = partial(plan_prefill, queries=config.queries, above=16)
    cases.append(layer.case(config, plan, window=4096, softcap=50.0))
    return cases


def _prefill_case(model: str, page: int, stored: str = "bfloat16", usual: bool = True) -> Case:
    layer = Layer("prefill", model, page, 2048, 16, stored, usual=usual)
    config = prefill_config(layer.shape)
    return layer.case(config, partial(plan_prefill, queries=config.queries, above=16))


def _run(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *rest: jax.Array,
    plan: Callable[[Ragged], WorkItems],
    config: Config,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    ragged, scales = Ragged.of(rest[:ARRAYS]), Scales(*rest[ARRAYS:]) if len(rest) > ARRAYS else None
    return paged_attention(
        q, k_pool, v_pool, ragged, plan(ragged), scale=DIM**-0.5, scales=scales, config=config, **options
    )
