"""Measure the throughput floor on an engine: every policy at saturation, with unattainable objectives.

    python benchmarks/floor_served.py                                # a Llama of 185 M random parameters, every policy
    python benchmarks/floor_served.py --policies unified kairos --model demo

The engine is loaded and compiled once. It serves the same requests, all submitted at once, under one policy after
another; each round starts with plain batching (`vllm`). Regime `below`: every request has a TPOT objective of
`--tight`, which no step can meet. Regime `none`: requests have no objectives. A cell is the median ratio of the
policy's output tokens per second to plain batching's. If the ratio is below 0.95, the cell adds the number of requests
that attained their objectives, of the policy and of plain batching: a policy may leave rows out of a step only if more
requests attain their objectives.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
from compare_bench.models import llama

from jaxserve import LLM, SamplingParams
from jaxserve.config import ServeConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.assemble import Machine, assemble
from jaxserve.report.table import print_table
from jaxserve.sched import policies
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.sim.floor import LEAST

PLAIN = "vllm"
REGIMES = ("none", "below")


def served(machine: Machine, policy: str, slo: SLO, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Serve one load under one policy: seconds, tokens per second, and the number of requests that attained `slo`."""
    draw = np.random.default_rng(seed)
    prompts = [one.tolist() for one in draw.integers(16, 4000, (args.requests, args.prompt))]
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    engine = Engine.on(machine.serving(replace(machine.config, policy=policy)))
    with LLM(config=machine.config, engine=engine) as llm:
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, slo=slo, use_tqdm=False)
        seconds = time.perf_counter() - began
        attained = engine.stats().attained
    tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    assert tokens == args.requests * args.tokens, "a request was lost"
    return {"policy": policy, "seconds": seconds, "tokens_per_s": tokens / seconds, "attained": attained}


def measured(machine: Machine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every policy in every regime, in turns."""
    slos = {"none": NO_SLO, "below": SLO(args.tight * 100, args.tight)}
    served(machine, PLAIN, NO_SLO, args, 0)  # warm up
    rows = []
    for number in range(args.repeats):
        for regime in REGIMES:
            for policy in (PLAIN, *(name for name in args.policies if name != PLAIN)):
                found = served(machine, policy, slos[regime], args, number)
                rows.append({"regime": regime, "round": number, **found})
    return rows


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    def of(policy: str, regime: str, key: str) -> float:
        return median(row[key] for row in rows if (row["policy"], row["regime"]) == (policy, regime))

    made = []
    for policy in names:
        cells = []
        for regime in REGIMES:
            share = of(policy, regime, "tokens_per_s") / of(PLAIN, regime, "tokens_per_s")
            gained = f" ({of(policy, regime, 'attained'):g} / {of(PLAIN, regime, 'attained'):g})"
            cells.append(f"{share:.2f}" + gained * (share < LEAST))
        made.append([policy, *cells])
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--policies", nargs="+", default=[name for name in policies.names() if name != PLAIN], help="[all]")
    add("--model", default="llama", help="llama, demo, or a folder with safetensors [llama]")
    add("--requests", type=int, default=16)
    add("--prompt", type=int, default=64, metavar="TOKENS", help="prompt length of each request [64]")
    add("--tokens", type=int, default=48, metavar="TOKENS", help="output length of each request [48]")
    add("--tight", type=float, default=0.002, metavar="S", help="unattainable TPOT objective [0.002]")
    add("--repeats", type=int, default=3)
    common.add_output(parser, "floor_served")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as room:
        folder = common.DEMO if args.model == "demo" else llama(Path(room)) if args.model == "llama" else args.model
        length = args.prompt + args.tokens + 1
        machine = assemble(
            ServeConfig.load(
                model=str(folder), mesh="1x1", max_model_len=length, max_num_seqs=args.requests,
                enable_prefix_caching=False, dtype="float32",
            )
        )  # fmt: skip
        rows = measured(machine, args)
    print_table(f"tokens/s, share of {PLAIN}'s", ["policy", *REGIMES], table(rows, [PLAIN, *args.policies]))
    common.save(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
