"""Time matmuls with 8-bit weights at decode: the kernel, XLA, and XLA with bfloat16 weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.quantized import Quantized, einsum
from pallas_kernels.mosaic import compat
from pallas_kernels.ops.quantized_matmul.cases import MODELS
from pallas_kernels.ops.quantized_matmul.hopper import QuantizedSpec

from .session import POOLS, Session, normal, reading

TOKENS = (8, 64, 256)
FORMS = (("int8", False), ("float8_e4m3fn", False), ("float8_e4m3fn", True))  # (dtype, scales per block)


def times(session: Session) -> None:
    if session.dry:
        for blocks in (False, True):
            _case(session, "narrow 256x256", QuantizedSpec(4, 256, 256, 2 if blocks else 1, jnp.float16, jnp.int8, 2))
        return
    for model, sizes in MODELS.items():
        for inputs, outputs in sizes:
            for tokens in TOKENS:
                for stored, blocks in FORMS:
                    spec = QuantizedSpec(
                        tokens, inputs, outputs, inputs // 128 if blocks else 1, stored=jnp.dtype(stored)
                    )
                    _case(session, f"narrow {model} {inputs}x{outputs}", spec)


def _case(session: Session, name: str, spec: QuantizedSpec) -> None:
    form = f"{jnp.dtype(spec.stored).name} {'blocks' if spec.scales > 1 else 'channels'}"
    name = f"{name} t{spec.tokens} {form}"
    for label in ("mosaic", "xla", "xla bfloat16"):
        found = session.part(f"{name}: {label}", lambda label=label: _measure(session, spec, label))
        if found is not None:
            size = 2 if label == "xla bfloat16" else 1
            moved = spec.inputs * spec.outputs * size + 2.0 * spec.tokens * (spec.inputs + spec.outputs)
            flops = 2.0 * spec.tokens * spec.inputs * spec.outputs
            session.add(name, label, found, moved=moved, flops=flops)


def _measure(session: Session, spec: QuantizedSpec, label: str) -> Any:
    from pallas_kernels.mosaic.interpret import interpreter
    from pallas_kernels.ops.quantized_matmul.hopper import heuristic, quantized_matmul

    if session.dry and label == "mosaic" and not compat.DETECTS_RACES:
        raise NotImplementedError(f"a dry run needs the interpreter of jax 0.11; this is {jax.__version__}")
    config, interpret = heuristic(spec), interpreter() if session.dry else None

    def call(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        if label == "mosaic":
            return quantized_matmul(x, values, scale, config=config, interpret=interpret)
        return einsum("ti,io->to", x, values if label == "xla bfloat16" else Quantized(values, scale, 0))

    # Enough weights to exceed the level-2 cache.
    count = 2 if session.dry else max(POOLS, -(-(200 << 20) // (spec.inputs * spec.outputs)))
    kind = spec.dtype if label == "xla bfloat16" else spec.stored
    weights = [
        (normal((spec.inputs, spec.outputs), kind, i), jnp.full((spec.scales, spec.outputs), 0.01, jnp.float32))
        for i in range(count)
    ]
    turns = session.turns(spec.inputs * spec.outputs / session.ceilings.copy)
    x = normal((spec.tokens, spec.inputs), spec.dtype, 99)
    return session.seconds(reading(call, turns), (x, weights, ()), turns * count)
