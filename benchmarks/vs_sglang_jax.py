"""Compare tokens per second and TTFT of running jaxserve and sglang-jax servers under the same load.

Both must serve the same weights at the same precision. The servers alternate, so that other load on the machine affects
both alike. sglang-jax needs Python 3.12 or newer and its source:

    python3.12 -m venv v && v/bin/pip install -e 'sglang-jax/python[cpu]'
    JAX_PLATFORMS=cpu v/bin/python -m sgl_jax.launch_server --model-path MODEL --device cpu --dtype float32 \\
      --attention-backend native --grammar-backend none --tp-size 1 --page-size 1 --max-running-requests 8 \\
      --max-prefill-tokens 512 --chunked-prefill-size 256 --context-length 1024 --max-total-tokens 8192 \\
      --disable-precompile --skip-server-warmup --host 127.0.0.1 --port 31000
    python -m jaxserve.run --mesh 1x1 --model MODEL --port 8000

Its native backend needs a head_dim of 128, and a tokenizer that maps ids to printable words.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import common

from jaxserve.report.table import print_table

FIGURES = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "median TTFT, ms",
    "p99_ttft_ms": "p99 TTFT, ms",
    "median_tpot_ms": "median TPOT, ms",
    "median_e2el_ms": "median latency, ms",
}


def load(name: str, url: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    flags = [
        *("--num-prompts", str(args.num_prompts), "--request-rate", str(args.request_rate), "--client", "http"),
        *("--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)),
        *("--random-ids", args.random_ids, "--seed", str(seed), "--metadata", f"engine={name}"),
    ]
    return common.bench(url, flags)


@contextmanager
def resting(group: int | None) -> Iterator[None]:
    """Stop a process group during the block."""
    if group is None:
        yield
        return
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--jaxserve-url", required=True)
    parser.add_argument("--sglang-url", required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--request-rate", type=float, default=4.0)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--random-ids", default="16:256", metavar="LOW:HIGH", help="token ids that both models have")
    seed = int(time.time()) % 1_000_000  # the servers' prefix caches may hold the prompts of an earlier run
    parser.add_argument("--seed", type=int, default=seed, help="[from the clock]")
    parser.add_argument(
        "--rest", type=int, metavar="PGID", help="process group of sglang-jax, which is stopped during jaxserve's "
        "turns: its idle scheduler polls, which occupies a core"
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="counted runs, after one warm-up run")
    common.add_output(parser, "vs_sglang_jax")
    args = parser.parse_args()
    urls = {"jaxserve": args.jaxserve_url, "sglang-jax": args.sglang_url}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    for repeat in range(args.repeats + 1):
        for name, url in urls.items():
            with resting(args.rest if name == "jaxserve" else None):
                runs[name].append(load(name, url, args, args.seed + repeat))
    rows: list[list[object]] = []
    for name, found in runs.items():
        rows.append([f"{name}, first run", found[0]["completed"], *(found[0][key] for key in FIGURES)])
        warm = [median(run[key] for run in found[1:]) for key in FIGURES]
        rows.append([f"{name}, warm", sum(run["completed"] for run in found[1:]), *warm])
    ratios = [
        median(ours[key] / theirs[key] for ours, theirs in zip(*(r[1:] for r in runs.values()), strict=True))
        for key in FIGURES
    ]
    rows.append(["jaxserve / sglang-jax, warm", None, *ratios])
    print_table(
        f"{args.input_len} tokens in, {args.output_len} out, {args.request_rate:g} requests/s",
        ["engine", "completed", *FIGURES.values()],
        rows,
    )
    common.save(args, {"runs": runs, "ratios": dict(zip(FIGURES, ratios, strict=True))})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
