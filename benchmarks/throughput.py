"""Tokens per second of `LLM.generate` against transformers, on the same weights, prompts and number of threads.

Sides: `jaxserve`; `generate`, transformers' batched generate; `continuous`, transformers' continuous batching. Each
lives in a process of its own, pinned to the same cores and stopped (SIGSTOP) while another runs, so that no thread
pool disturbs another; they take turns, so that a busy machine disturbs all alike. Greedy, float32, fixed lengths.
`decode` is the rate of the `--tokens` tokens after the first: tokens * requests / (time of tokens + 1 - time of 1).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np

from jaxserve.report.table import print_table

Generate = Callable[[list[list[int]], int], list[list[int]]]
MARK = "@@"  # before the lines of a worker that are for its parent


def jaxserve_side(model: Path, threads: int, most: int, length: int) -> Generate:
    from jaxserve import LLM, SamplingParams

    llm = LLM(
        str(model),
        mesh="1x1",
        dtype="float32",
        max_num_seqs=most,
        max_model_len=length,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return [list(found.outputs[0].token_ids) for found in llm.generate(prompts, params)]

    return generate


def _torch_model(model: Path, threads: int, attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=attention)
    return loaded.eval()


def generate_side(model: Path, threads: int, most: int, length: int) -> Generate:
    import torch

    loaded = _torch_model(model, threads, "sdpa")

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        out = loaded.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows

    return generate


def continuous_side(model: Path, threads: int, most: int, length: int) -> Generate:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    loaded = _torch_model(model, threads, "sdpa")
    page = 32
    pool = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=most * -(-length // page) + 1,
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        config = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        found = loaded.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=pool,
            persistent_manager=True,
            progress_bar=False,
            warmup=False,
        )
        return [list(one.generated_tokens) for one in found.values()]

    return generate


SIDES = {"jaxserve": jaxserve_side, "generate": generate_side, "continuous": continuous_side}


def prompts_of(count: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    drawn: list[list[int]] = np.random.default_rng(seed).integers(16, vocabulary, (count, length)).tolist()
    return drawn


def worker(args: argparse.Namespace) -> int:
    """Read `requests tokens seed` from stdin, answer with the seconds it took; anything else ends it."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: args.threads]))
    vocabulary = json.loads((args.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    most, length = max(args.requests), max(512, args.prompt + args.tokens + 2)
    generate = SIDES[args.worker](args.model, args.threads, most, length)
    print(MARK, "ready", flush=True)
    for line in sys.stdin:
        requests, tokens, seed = map(int, line.split())
        prompts = prompts_of(requests, args.prompt, seed, vocabulary)
        began = time.perf_counter()
        out = generate(prompts, tokens)
        seconds = time.perf_counter() - began
        assert [len(row) for row in out] == [tokens] * requests, "a side gave another number of tokens"
        print(MARK, json.dumps({"seconds": seconds, "first": out[0][:8]}), flush=True)
    return 0


class Side:
    """A worker process."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        command = [sys.executable, __file__, "--worker", name, "--model", str(args.model)]
        command += ["--threads", str(args.threads), "--prompt", str(args.prompt), "--tokens", str(args.tokens)]
        command += ["--requests", *map(str, args.requests)]
        # Threads of a side that waits must not spin on the cores of the side that runs.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(args.threads)}
        environment |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.read()
        os.kill(self.process.pid, signal.SIGSTOP)

    def read(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return line[len(MARK) :].strip()
        raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")

    def run(self, requests: int, tokens: int, seed: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        os.kill(self.process.pid, signal.SIGCONT)
        print(requests, tokens, seed, file=self.process.stdin, flush=True)
        found = json.loads(self.read())
        os.kill(self.process.pid, signal.SIGSTOP)
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def compare(sides: Sequence[Side], requests: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians over the repeats for one number of concurrent requests; the sides take turns."""
    for side in sides:  # compile, allocate
        for tokens in (1, args.tokens + 1):
            side.run(requests, tokens, 10_000)
    whole: dict[str, list[float]] = {side.name: [] for side in sides}
    first: dict[str, list[float]] = {side.name: [] for side in sides}
    agree: dict[str, int] = {side.name: 0 for side in sides}
    for repeat in range(args.repeats):
        reference = None
        for side in sides:
            first[side.name].append(side.run(requests, 1, repeat)["seconds"])
            found = side.run(requests, args.tokens + 1, repeat)
            whole[side.name].append(found["seconds"])
            reference = reference or found["first"]
            agree[side.name] += found["first"] == reference
    rows = []
    for side in sides:
        total, prefill = median(whole[side.name]), median(first[side.name])
        row: dict[str, Any] = {"side": side.name, "requests": requests}
        row["output_tokens_per_s"] = requests * (args.tokens + 1) / total
        row["decode_tokens_per_s"] = requests * args.tokens / max(total - prefill, 1e-9)
        row["first_token_s"] = prefill
        row["same_first_8_tokens"] = f"{agree[side.name]}/{args.repeats}"
        rows.append({**row, "seconds": whole[side.name], "seconds_first": first[side.name]})
    for row in rows:
        for key in ("output_tokens_per_s", "decode_tokens_per_s"):
            row[f"jaxserve_ratio_{key}"] = rows[0][key] / row[key] if rows[0]["side"] == "jaxserve" else None
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--model", type=Path, default=common.DEMO, help="folder with safetensors [the demo model]")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32], metavar="N")
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=list(SIDES), help=argparse.SUPPRESS)
    common.add_output(parser, "throughput")
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    sides: list[Side] = []
    try:
        sides += [Side(name, args) for name in args.sides]
        rows = [row for requests in args.requests for row in compare(sides, requests, args)]
    finally:
        for side in sides:
            side.close()
    keys = ["side", "requests", "decode_tokens_per_s", "output_tokens_per_s", "first_token_s"]
    keys += ["jaxserve_ratio_decode_tokens_per_s", "jaxserve_ratio_output_tokens_per_s", "same_first_8_tokens"]
    titles = ["side", "requests", "decode tok/s", "output tok/s", "first token, s", "jaxserve / it (decode)"]
    titles += ["jaxserve / it (output)", "same first 8 tokens"]
    print_table(f"{args.prompt} tokens in, {args.tokens} out", titles, [[row[key] for key in keys] for row in rows])
    common.save(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
