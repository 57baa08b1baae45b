"""Compile-gate cases of products with 8-bit weights; the benchmark takes its sizes from here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes
from pallas_kernels.ops.quantized_matmul.hopper import (
    QuantizedSpec,
    heuristic,
    quantized_matmul,
)

# I and O of the dense products: queries, keys and values; out; gate and up; down.
MODELS = {
    "llama3-8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "qwen3-30b-a3b": ((2048, 5120), (4096, 2048)),
}


def cases() -> Iterator[Case]:
    """Yield the configs in use: dtypes, kinds of scales, and the tokens of decode steps of served models."""
    up, down = MODELS["llama3-8b"][2:]
    for stored in (jnp.int8, jnp.float8_e4m3fn):
        for blocks in (False, True):
            yield _case("llama3-8b up", up, 64, stored, blocks)
    for tokens in (8, 16, 32, 128, 256):
        yield _case("llama3-8b down", down, tokens, jnp.float8_e4m3fn, True, usual=tokens in (8, 256))
    for name, sizes in MODELS.items():
        for number, size in enumerate(sizes[:2]):
            yield _case(f"{name} {('qkv', 'out')[number]}", size, 64, jnp.float8_e4m3fn, True, usual=False)
    yield _case("llama3-8b up", up, 64, jnp.int8, True, jnp.float16, usual=False)


def _case(
    name: str,
    size: tuple[int, int],
    tokens: int,
    stored: Any,
    blocks: bool,
    dtype: Any = jnp.bfloat16,
    usual: bool = True,
) -> Case:
    inputs, outputs = size
    spec = QuantizedSpec(tokens, inputs, outputs, inputs // 128 if blocks else 1, dtype, stored)
    return Case(
        name=f"quantized_matmul {name} {jnp.dtype(stored).name} {'blocks' if blocks else 'channels'}"
        f" {jnp.dtype(dtype).name} t{tokens}",
        program=partial(quantized_matmul, config=heuristic(spec)),
        arguments=shapes(((tokens, inputs), dtype), ((inputs, outputs), stored), ((spec.scales, outputs), jnp.float32)),
        needs=frozenset({"wgmma", "tma"}),
        usual=usual,
    )
