"""Compile-gate cases of the grouped product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes
from pallas_kernels.ops.grouped_matmul.api import Gate
from pallas_kernels.ops.grouped_matmul.hopper.matmul import Config, GroupedSpec, grouped_matmul, heuristic, plan

# X, I and O of the two products of a layer: gate and up together, and down.
MODELS = {
    "qwen3-30b-a3b": (128, 2048, 768),
    "qwen3-30b-a3b tp4": (32, 2048, 768),
    "gpt-oss-20b": (32, 2880, 2880),
    "deepseek-v2-lite": (64, 2048, 1408),
    "minimax-m2 tp4": (64, 3072, 1536),
}
CHOSEN = {"qwen3-30b-a3b": 8, "qwen3-30b-a3b tp4": 8, "gpt-oss-20b": 4, "deepseek-v2-lite": 6, "minimax-m2 tp4": 8}


def cases() -> Iterator[Case]:
    """Yield the configs in use: both products of decode and prefill steps of served models."""
    for model in ("qwen3-30b-a3b", "qwen3-30b-a3b tp4", "gpt-oss-20b"):
        usual = model == "qwen3-30b-a3b"
        for tokens in (1, 64, 256, 4096):
            yield from _cases(model, tokens, usual=usual and tokens > 1)
    yield next(_cases("qwen3-30b-a3b", 64, jnp.float16))
    for stored, blocks in product((jnp.int8, jnp.float8_e4m3fn), (False, True)):
        for tokens in (1, 64, 4096):
            usual = tokens > 1 and blocks == (stored != jnp.int8)
            yield from _cases("qwen3-30b-a3b", tokens, stored=stored, blocks=blocks, usual=usual)
    yield next(_cases("qwen3-30b-a3b", 256, jnp.float16, stored=jnp.float8_e4m3fn, blocks=True, usual=False))
    for tokens in (64, 256, 4096):
        yield from _cases("deepseek-v2-lite", tokens, stored=jnp.int8, usual=False)
        yield from _cases("minimax-m2 tp4", tokens, stored=jnp.float8_e4m3fn, blocks=True, usual=False)


def _cases(
    model: str, tokens: int, dtype: Any = jnp.bfloat16, *, stored: Any = None, blocks: bool = False, usual: bool = True
) -> Iterator[Case]:
    """Yield both products of a layer."""
    (experts, dim, ff_dim), pairs = MODELS[model], tokens * CHOSEN[model]
    for part, width, outputs, out_dtype in (("up", dim, 2 * ff_dim, None), ("down", ff_dim, dim, jnp.float32)):
        gated = part == "up" and model != "gpt-oss-20b"  # whose biases come before the gate
        spec = GroupedSpec(pairs, experts, width, outputs, dtype, stored, width // 128 if blocks else 1, gated=gated)
        yield _case(f"{model} {part}", spec, out_dtype, tokens, usual)


def _case(name: str, spec: GroupedSpec, out_dtype: Any, tokens: int, usual: bool) -> Case:
    config = heuristic(spec)
    rows = len(jax.eval_shape(lambda: plan(jnp.zeros(spec.pairs, jnp.int32), spec.experts)).source)
    form, kind = "swapped" if config.swapped else "straight", jnp.dtype(spec.dtype).name
    arguments = shapes(
        ((rows, spec.width), spec.dtype),
        ((spec.experts, spec.width, spec.outputs), spec.stored or spec.dtype),
        ((spec.pairs,), jnp.int32),
    )
    if spec.quantized:
        form = f"{jnp.dtype(spec.stored).name} {'blocks' if spec.scales > 1 else 'channels'}"
        arguments += shapes(((spec.experts, spec.scales, spec.outputs), jnp.float32))
    return Case(
        name=f"grouped_matmul {name} {form} {kind} t{tokens}",
        program=partial(_step, config=config, out_dtype=out_dtype, gate=_swiglu if spec.gated else None),
        arguments=arguments,
        needs=frozenset({"wgmma", "tma"}),
        usual=usual,
    )


def _step(
    x: jax.Array,
    weight: jax.Array,
    chosen: jax.Array,
    scale: jax.Array | None = None,
    *,
    config: Config,
    out_dtype: Any,
    gate: Gate | None,
) -> jax.Array:
    """Plan, and compute one product."""
    work = plan(chosen, len(weight))
    return grouped_matmul(x, weight, work, scale=scale, out_dtype=out_dtype, gate=gate, config=config)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up
