"""Measure the host time that is not hidden behind steps: the gap between the end of a step and the start of the next.

Decodes a full batch through `LLM.generate`, and reads the start and end of every step from the journal. Then sends the
same load over HTTP, with the client on the same cores, to show the cost of server and client.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from engine_bench.gaps import gaps

from jaxserve.report.table import print_table


def load(args: argparse.Namespace) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(16, 4096) for _ in range(args.prompt)] for _ in range(args.requests)]


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """Return gaps and step times of full batches in the second of two equal runs."""
    from jaxserve import LLM, SamplingParams

    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        with LLM(mesh="1x1", max_num_seqs=args.requests, max_model_len=1024, journal=str(journal)) as llm:
            llm.generate(load(args), params, use_tqdm=False)
            began = time.perf_counter()
            llm.generate(load(args), params, use_tqdm=False)
            seconds = time.perf_counter() - began
        lines = journal.read_text(encoding="utf-8").splitlines()
    return {**gaps(lines, began, args.requests), "tokens_per_s": args.requests * args.tokens / seconds}


def over_http(args: argparse.Namespace) -> float:
    """Return the output tokens per second of the same load, streamed over HTTP."""
    flags = [
        *("--dataset-name", "random", "--random-input-len", str(args.prompt), "--random-output-len", str(args.tokens)),
        *("--num-prompts", str(2 * args.requests), "--max-concurrency", str(args.requests)),
        *("--num-warmups", "2", "--ignore-eos"),
    ]
    with common.server(["--mesh", "1x1", "--max-num-seqs", str(args.requests), "--max-model-len", "1024"]) as server:
        return float(common.bench(server.url, flags)["output_throughput"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    common.add_output(parser, "host_gap")
    args = parser.parse_args()
    found = offline(args)
    found["http_tokens_per_s"] = over_http(args)
    rows = [
        ["full-batch decode steps", found["steps"]],
        ["step, median ms", found["step_ms"]],
        ["gap, mean ms", found["gap_ms_mean"]],
        ["gap / (gap + step), %", 100 * found["gap_share"]],
        ["steps submitted before the previous one ended, %", 100 * found["planned_ahead"]],
        ["tokens/s through LLM.generate", found["tokens_per_s"]],
        ["tokens/s through HTTP, client on the same cores", found["http_tokens_per_s"]],
    ]
    print_table(f"{args.requests} requests, {args.prompt} tokens in, {args.tokens} out", ["", ""], rows)
    common.save(args, {"found": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
