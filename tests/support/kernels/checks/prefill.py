"""Check prefill attention against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.ops.paged_attention.hopper.prefill import Config, paged_prefill
from tests.support.kernels.checks import decode

SMALL = Config(heads=2, keys=64, blocks=2)
# A chunk after cached tokens, a decode row, a prompt, a long context.
MIXED = ((40, 70), (3, 9), (20, 20), (17, 150))


@dataclass(frozen=True)
class Problem(decode.Problem):
    """As of decode, with longer rows."""

    rows: Sequence[tuple[int, int]] = MIXED
    page: int = 16
    pool: int = 40  # pages


def check(problem: Problem, config: Config) -> None:
    results = decode.compute(problem, config, paged_prefill)
    decode.compare(problem, results, lambda length: length > config.above, 2e-2)


CASES = {
    "head dim 256": (Problem(dim=256), SMALL),
    "head dim 256, a window and a soft cap": (Problem(dim=256, heads=4, kv_heads=2, window=33, softcap=4.0), SMALL),
    "head dim 256, each block one item": (Problem(dim=256, heads=3), Config(heads=1, keys=64, blocks=1000)),
    "float8": (Problem(stored=jnp.float8_e4m3fn, heads=4, kv_heads=2), SMALL),
    "float8, head dim 128": (Problem(stored=jnp.float8_e4m3fn, dim=128), replace(SMALL, keys=128, stages=1)),
    "float8 beside float16": (Problem(stored=jnp.float8_e4m3fn, dtype=jnp.float16), SMALL),
    "int8, three stages": (Problem(stored=jnp.int8), replace(SMALL, stages=3)),
    "int8, one stage": (Problem(stored=jnp.int8), replace(SMALL, stages=1)),
    "int8, a page of two tiles": (Problem(stored=jnp.int8, page=128), SMALL),
    "int8, a window, a soft cap and padding": (Problem(stored=jnp.int8, window=20, softcap=5.0, padded=5), SMALL),
    "int8, each block one item": (Problem(stored=jnp.int8), replace(SMALL, blocks=1000)),
    "one head of a group of three": (Problem(heads=3), Config(heads=1, keys=64, blocks=1)),
    "groups of four": (Problem(heads=8, kv_heads=2), Config(heads=4, keys=64, blocks=3)),
    "groups of eight, tiles of 16 tokens": (Problem(heads=8), Config(heads=8, keys=64, blocks=2)),
    "two heads of a group of six": (Problem(heads=6), SMALL),
    "each block one item": (Problem(), replace(SMALL, blocks=1000)),
    "keys of 128": (Problem(), replace(SMALL, keys=128)),
    "three stages": (Problem(), replace(SMALL, stages=3)),
    "one stage": (Problem(), replace(SMALL, stages=1)),
    "no turns": (Problem(), replace(SMALL, ping_pong=False)),
    "overlap": (Problem(), replace(SMALL, overlap=True)),
    "overlap, no turns": (Problem(), replace(SMALL, overlap=True, ping_pong=False)),
    "ahead": (Problem(), replace(SMALL, ahead=True)),
    "ahead, int8, an item each": (Problem(stored=jnp.int8), replace(SMALL, ahead=True, blocks=1000)),
    "ahead, overlap, a window and padding": (
        Problem(heads=4, kv_heads=2, dim=128, window=20, padded=5),
        replace(SMALL, ahead=True, overlap=True),
    ),
    "ahead, nothing but decode rows": (Problem(rows=((1, 5), (2, 9)), padded=30), replace(SMALL, ahead=True)),
    "weights in registers": (Problem(), replace(SMALL, p_in_smem=False)),
    "float16": (Problem(dtype=jnp.float16), SMALL),
    "head dim 128": (Problem(dim=128), SMALL),
    "a page of two tiles": (Problem(page=128), SMALL),
    "a window": (Problem(window=33), SMALL),
    "a window of one key": (Problem(window=1), SMALL),
    "a window wider than any context": (Problem(window=1000), SMALL),
    "a soft cap": (Problem(softcap=3.0), SMALL),
    "a window, a soft cap and padding": (Problem(window=20, softcap=5.0, padded=5), SMALL),
    "fewer tokens than a tile": (Problem(rows=((5, 5),)), replace(SMALL, above=0)),
    "around the edges of pages and tiles": (Problem(rows=((17, 31), (32, 32), (33, 33), (16, 16), (64, 65))), SMALL),
    "shared pages": (
        Problem(rows=((20, 40), (20, 40), (18, 36)), tables=((5, 9, 2), (5, 9, 7), (5, 3, 2))),
        SMALL,
    ),
    "sinks": (Problem(sinks=True, heads=4), SMALL),
    "nothing but decode rows": (Problem(rows=((1, 5), (2, 9)), padded=30), SMALL),
}  # fmt: skip
