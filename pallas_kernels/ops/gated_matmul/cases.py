"""Compile-gate cases of gated products; the benchmark takes its sizes from here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes
from pallas_kernels.ops.gated_matmul.api import GATES
from pallas_kernels.ops.gated_matmul.hopper import gated_matmul, heuristic, spec_of

# I and F of one shard, and the activation.
MODELS = {
    "llama3-8b": (4096, 14336, "silu"),
    "llama3-8b tp4": (4096, 3584, "silu"),
    "gemma3-1b": (1152, 6912, "gelu_pytorch_tanh"),
}
TOKENS = (8, 32, 64, 256, 2048)


def cases() -> Iterator[Case]:
    """Yield the configs in use: the tokens of decode and verify steps of served models."""
    for model in MODELS:
        for tokens in TOKENS:
            yield _case(model, tokens, usual=tokens == 64 or (model == "llama3-8b" and tokens in (32, 256)))
    yield _case("llama3-8b", 256, jnp.float16, usual=False)


def _case(model: str, tokens: int, dtype: Any = jnp.bfloat16, *, usual: bool) -> Case:
    inputs, results, activation = MODELS[model]
    config = heuristic(spec_of(tokens, inputs, 2 * results, dtype))
    form = "swapped" if config.swapped else f"straight {config.columns}"
    return Case(
        name=f"gated_matmul {model} {form} {jnp.dtype(dtype).name} t{tokens}",
        program=partial(gated_matmul, gate=GATES[activation], config=config),
        arguments=shapes(((tokens, inputs), dtype), ((inputs, 2 * results), dtype)),
        needs=frozenset({"wgmma", "tma"}),
        usual=usual,
    )
