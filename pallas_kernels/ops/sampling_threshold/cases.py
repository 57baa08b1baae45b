"""Compile-gate cases of the sampling thresholds."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes
from pallas_kernels.ops.sampling_threshold.hopper import heuristic, thresholds
from pallas_kernels.ops.sampling_threshold.search import Found, Options

VOCABULARIES = {"llama3": 128256, "qwen3": 151936, "opt": 50272}


def cases() -> Iterator[Case]:
    """Yield the configs in use: vocabularies of served models, and few rows.

    The vocabularies have one config, and a kernel takes 20 s to compile. The largest is usual; programs that draw,
    also usual, contain the kernel for that of Llama 3.
    """
    for name, vocab in VOCABULARIES.items():
        for rows in (1, 256):
            yield _case(name, rows, vocab, usual=(name, rows) == ("qwen3", 256))
    yield _case("small", 32, 4096)


def _case(name: str, rows: int, vocab: int, usual: bool = True) -> Case:
    def program(x: jax.Array, *options: jax.Array) -> Found:
        return thresholds(x, Options(*options), config=heuristic(vocab))

    options = [((rows,), jnp.float32)] * len(Options._fields)
    return Case(
        name=f"sampling_threshold {name} r{rows}",
        program=program,
        arguments=shapes(((rows, vocab), jnp.float32), *options),
        usual=usual,
    )
