"""Time matmuls with 8-bit weights at decode: the kernel, XLA, and XLA with bfloat16 weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.gpu_day.part import Run
from jaxserve.models.quantized import Quantized, einsum
from pallas_kernels.ops.quantized_matmul.cases import MODELS
from pallas_kernels.ops.quantized_matmul.hopper import QuantizedSpec

from .timing import POOLS, Timing, interpreter_or_none, normal, reading

# The widest product of an 8B layer, its narrowest, and a small one: the other products lie between them.
SIZES = tuple(
    (model, *MODELS[model][number]) for model, number in (("llama3-8b", 2), ("llama3-8b", 1), ("qwen3-30b-a3b", 0))
)
FORMS = (("int8", False), ("float8_e4m3fn", False), ("float8_e4m3fn", True))  # (dtype, scales per block)


def specs(dry: bool) -> dict[str, QuantizedSpec]:
    """Return representative products: every form at 64 tokens, and per-channel int8 at 8 and 256."""
    if dry:
        small = {blocks: QuantizedSpec(4, 256, 256, 2 if blocks else 1, jnp.float16, jnp.int8, 2) for blocks in (0, 1)}
        return {f"quantized 256x256 {'blocks' if blocks else 'channels'}": spec for blocks, spec in small.items()}
    asked = [(64, form) for form in FORMS] + [(8, FORMS[0]), (256, FORMS[0])]
    return {
        f"quantized {model} {inputs}x{outputs} t{tokens} {stored} {'blocks' if blocks else 'channels'}": QuantizedSpec(
            tokens, inputs, outputs, inputs // 128 if blocks else 1, stored=jnp.dtype(stored)
        )
        for model, inputs, outputs in SIZES
        for tokens, (stored, blocks) in asked
    }


def measure(run: Run, containing: str) -> None:
    """Time the products whose names contain a text."""
    time = Timing(run)
    with time.each() as attempt:
        for name, spec in specs(run.dry).items():
            for label in ("mosaic", "xla", "xla bfloat16") if containing in name else ():
                attempt(f"{name}: {label}", lambda name=name, spec=spec, label=label: _measure(time, name, spec, label))


def _measure(time: Timing, name: str, spec: QuantizedSpec, label: str) -> None:
    from pallas_kernels.ops.quantized_matmul.hopper import heuristic, quantized_matmul

    config, interpret = heuristic(spec), interpreter_or_none(time.dry) if label == "mosaic" else None

    def call(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        if label == "mosaic":
            return quantized_matmul(x, values, scale, config=config, interpret=interpret)
        return einsum("ti,io->to", x, values if label == "xla bfloat16" else Quantized(values, scale, 0))

    # Enough weights to exceed the level-2 cache.
    count = 2 if time.dry else max(POOLS, -(-(200 << 20) // (spec.inputs * spec.outputs)))
    kind = spec.dtype if label == "xla bfloat16" else spec.stored
    weights = [
        (normal((spec.inputs, spec.outputs), kind, i), jnp.full((spec.scales, spec.outputs), 0.01, jnp.float32))
        for i in range(count)
    ]
    size = 2 if label == "xla bfloat16" else 1
    moved = spec.inputs * spec.outputs * size + 2.0 * spec.tokens * (spec.inputs + spec.outputs)
    flops = 2.0 * spec.tokens * spec.inputs * spec.outputs
    turns = time.turns(time.floor(moved, flops))
    x = normal((spec.tokens, spec.inputs), spec.dtype, 99)
    found = time.seconds(reading(call, turns), (x, weights, ()), turns * count)
    time.add(name, label, found, moved=moved, flops=flops)
