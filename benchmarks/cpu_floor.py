"""Measure the lower bound of a step of `compare.py`'s 185 M Llama on this CPU: memory bandwidth and matmuls.

    python benchmarks/cpu_floor.py

Prints a row for each number of tokens in a step. A step cannot be faster than reading its weights and KV once, nor than
its matmuls. Matmuls are timed over all layers, each with its own weights, so that weights come from memory as in a real
step: by XLA in the layout that the engine uses on CPUs, and by torch, which vLLM and transformers use.

    weights, ms    bytes of all weights / measured bandwidth
    KV, ms         bytes of keys and values at `--context` tokens per row / measured bandwidth; 0 for prefill steps
    XLA, torch     ms of all matmuls, medians of `--repeats`
    GFLOP/s        FLOP rate of the faster one
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.transposed import product
from jaxserve.report.table import print_table

LAYERS, DIM, FF, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16, 1024, 2816, 16, 4, 64, 4096
SHAPES = (((HEADS + 2 * KV_HEADS) * HEAD_DIM, DIM), (DIM, HEADS * HEAD_DIM), (2 * FF, DIM), (DIM, FF))  # [out, in]


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median time of `repeats` runs after one warm-up run."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def bandwidth(threads: int, repeats: int) -> float:
    """Return the read bandwidth of `threads` threads in bytes per second, on arrays larger than the caches."""
    parts = np.split(np.ones(threads << 26, np.float32), threads)

    def read() -> None:
        workers = [threading.Thread(target=np.sum, args=(part,)) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return sum(part.nbytes for part in parts) / seconds(read, repeats)


def xla(tokens: int, weights: Sequence[np.ndarray], repeats: int) -> float:
    """Return the seconds that XLA takes for all matmuls of a step of `tokens` tokens."""
    inputs = {inputs: jnp.ones((tokens, inputs), jnp.float32) for _, inputs in SHAPES}
    on_device = [jnp.asarray(weight) for weight in weights]
    step = jax.jit(lambda inputs, weights: [product(inputs[one.shape[1]], one) for one in weights])
    return seconds(lambda: jax.block_until_ready(step(inputs, on_device)), repeats)


def torch(tokens: int, weights: Sequence[np.ndarray], threads: int, repeats: int) -> float:
    """Return the seconds that torch takes for all matmuls of a step of `tokens` tokens."""
    import torch

    torch.set_num_threads(threads)
    inputs = {inputs: torch.ones(tokens, inputs) for _, inputs in SHAPES}
    tensors = [torch.from_numpy(weight) for weight in weights]

    def run() -> None:
        for one in tensors:
            torch.nn.functional.linear(inputs[one.shape[1]], one)

    return seconds(run, repeats)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--tokens",
        nargs="+",
        type=int,
        default=[1, 8, 16, 32, 128, 512],
        metavar="N",
        help="numbers of tokens in a step",
    )
    add("--context", type=int, default=192, metavar="TOKENS", help="context length of a running decode [192]")
    add(
        "--decoding",
        type=int,
        default=32,
        metavar="N",
        help="largest number of tokens that counts as a decode step [32]",
    )
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=5)
    common.add_output(parser, "cpu_floor")
    args = parser.parse_args(argv)
    draw = np.random.default_rng(0)
    weights = [draw.standard_normal(shape, np.float32) for _ in range(LAYERS) for shape in SHAPES]
    size = sum(weight.nbytes for weight in weights)
    rate = bandwidth(args.threads, args.repeats)
    found = []
    for tokens in args.tokens:
        rows = tokens if tokens <= args.decoding else 0
        kv = 4 * 2 * LAYERS * KV_HEADS * HEAD_DIM * args.context * rows
        times = {"xla": xla(tokens, weights, args.repeats), "torch": torch(tokens, weights, args.threads, args.repeats)}
        flops = 2 * tokens * size / 4
        found.append({"tokens": tokens, "weights_s": size / rate, "kv_s": kv / rate, "flops": flops, **times})
    table = [
        [
            row["tokens"],
            *(f"{1e3 * row[name]:.1f}" for name in ("weights_s", "kv_s", "xla", "torch")),
            f"{row['flops'] / min(row['xla'], row['torch']) / 1e9:.0f}",
        ]
        for row in found
    ]
    print_table(
        f"{size / 1e6:.0f} MB of weights, {rate / 1e9:.1f} GB/s",
        ["tokens", "weights, ms", "KV, ms", "XLA, ms", "torch, ms", "GFLOP/s"],
        table,
    )
    common.save(args, {"bandwidth": rate, "bytes": size, "rows": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
