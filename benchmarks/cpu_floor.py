"""What this CPU allows a step of the 185 M Llama of `compare.py`: bandwidth, and the products of all its layers.

    python benchmarks/cpu_floor.py

One table, a row for each number of tokens in a step. No step is faster than reading its weights and its KV once, nor
than its products. Products are timed over all layers, each with weights of its own, so that weights come from memory
as they do in a step: XLA's in the layout that the engine uses on CPUs, and torch's, which vLLM and transformers call.

    weights, ms    bytes of all products / measured bandwidth
    KV, ms         bytes of keys and values at `--context` tokens a row / measured bandwidth; prompts: 0
    XLA, torch     ms of all products, medians of `--repeats`, and the FLOP rate of the faster one
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
    """Median over `repeats`, after one run that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def bandwidth(threads: int, repeats: int) -> float:
    """Bytes per second of `threads` that read memory, beyond what caches hold."""
    parts = np.split(np.ones(threads << 26, np.float32), threads)

    def read() -> None:
        workers = [threading.Thread(target=np.sum, args=(part,)) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return sum(part.nbytes for part in parts) / seconds(read, repeats)


def xla(tokens: int, weights: Sequence[np.ndarray], repeats: int) -> float:
    """Seconds of all products of `tokens` rows by XLA."""
    inputs = {inputs: jnp.ones((tokens, inputs), jnp.float32) for _, inputs in SHAPES}
    on_device = [jnp.asarray(weight) for weight in weights]
    step = jax.jit(lambda inputs, weights: [product(inputs[one.shape[1]], one) for one in weights])
    return seconds(lambda: jax.block_until_ready(step(inputs, on_device)), repeats)


def torch(tokens: int, weights: Sequence[np.ndarray], threads: int, repeats: int) -> float:
    """The same by torch."""
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
    add("--tokens", nargs="+", type=int, default=[1, 8, 16, 32, 128, 512], metavar="N", help="in a step")
    add("--context", type=int, default=192, metavar="TOKENS", help="of a decoding row [192]")
    add("--decoding", type=int, default=32, metavar="N", help="steps of up to so many tokens are decode steps [32]")
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
