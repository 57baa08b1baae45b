"""Measure the gain of speculative decoding: tokens per second without, with a fixed and with an adaptive draft length.

The three engines share one process and alternate on the same prompts, in every order. Reported are ratios within a
turn, so that other load on the machine affects all engines alike. Prompts are heads of functions of the standard
library, on which the demo model was trained; outputs have a fixed length.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import common

from jaxserve import LLM, SamplingParams
from jaxserve.report.table import print_table

DRAFT = common.DEMO.parent / "draft"
SIDES = ("none", "fixed", "adaptive")


def prompts_of(count: int, seed: int) -> list[str]:
    """Return random function heads, each with the line that follows."""
    folder, found = Path(sysconfig.get_path("stdlib")), []
    for name in ("textwrap", "heapq", "shlex", "fractions", "graphlib", "csv", "fnmatch", "argparse", "ast", "zipfile"):
        lines = (folder / f"{name}.py").read_text(encoding="utf-8").splitlines()
        found += ["\n".join(lines[at : at + 2]) for at, line in enumerate(lines) if line.lstrip().startswith("def ")]
    return random.Random(seed).sample(found, count)


def engine(side: str, args: argparse.Namespace, **given: Any) -> LLM:
    """Build one of SIDES; given: further settings."""
    if side != "none":
        settings = {"num_speculative_tokens": args.draft_tokens, "adaptive": side == "adaptive"}
        if args.method == "ngram":
            settings |= {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        else:
            settings |= {"method": "draft_model", "model": str(args.draft)}
        given["speculative_config"] = json.dumps(settings)
    return LLM(
        str(args.model),
        mesh="1x1",
        max_num_seqs=max(args.batch),
        max_model_len=512,
        enable_prefix_caching=False,
        **{"max_num_batched_tokens": 256, **given},
    )


def counted(llm: LLM) -> dict[str, Any]:
    counters = llm.engine.stats().counters
    named = ("drafts", "drafted", "accepted", "generated_tokens", "steps")
    return {name: getattr(counters, name) for name in named} | {"accepted_at": list(counters.accepted_at)}


def turn(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Generate for all prompts, and return the tokens per second."""
    began = time.perf_counter()
    found = llm.generate(prompts, params)
    return sum(len(one.outputs[0].token_ids) for one in found) / (time.perf_counter() - began)


def measured(
    engines: dict[str, LLM], size: int, args: argparse.Namespace, texts: Callable[[int, int], list[str]] = prompts_of
) -> dict[str, Any]:
    """Measure batches of `size`: the rates and the draft statistics of each engine.

    texts: returns that many prompts for a seed.
    """
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True, seed=0)
    rates: dict[str, list[float]] = {side: [] for side in engines}
    orders = list(permutations(engines))
    for llm in engines.values():
        turn(llm, texts(size, -1), params)
    before = {side: counted(llm) for side, llm in engines.items()}
    for index in range(args.turns):
        prompts = texts(size, index)
        for side in orders[index % len(orders)]:
            rates[side].append(turn(engines[side], prompts, params))
    found: dict[str, Any] = {"rates": rates}
    for side, llm in engines.items():
        now = counted(llm)
        more = {name: now[name] - before[side][name] for name in now if name != "accepted_at"}
        drafts = max(1, more["drafts"])
        pairs = zip(now["accepted_at"], before[side]["accepted_at"], strict=True)
        more["accepted_per_position"] = [round((a - b) / drafts, 4) for a, b in pairs][: args.draft_tokens]
        more["tokens_per_step"] = more["generated_tokens"] / max(1, more["steps"]) / size
        found[side] = more
    return found


def ratio(rates: dict[str, list[float]], side: str, *others: str) -> float:
    """Return the median over turns of a side's rate relative to the better of the others."""
    best = max(others, key=lambda other: median(rates[other]))
    return median(a / b for a, b in zip(rates[side], rates[best], strict=True))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("--model", type=Path, default=common.DEMO, metavar="FOLDER", help="the target model")
    made.add_argument("--draft", type=Path, default=DRAFT, metavar="FOLDER", help="the draft model")
    made.add_argument("--method", choices=("draft_model", "ngram"), default="draft_model", help="[%(default)s]")
    made.add_argument(
        "--draft-tokens", type=int, default=4, metavar="K", help="maximum number of drafted tokens [%(default)s]"
    )
    made.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="batch sizes")
    made.add_argument("--tokens", type=int, default=96, metavar="N", help="output length of each request [%(default)s]")
    made.add_argument("--turns", type=int, default=30, metavar="N", help="turns of each engine [%(default)s]")
    made.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[%(default)s]")
    common.add_output(made, "speculation")
    return made


def main() -> None:
    args = parser().parse_args()
    engines = {side: engine(side, args) for side in SIDES}
    rows, found = [], {}
    for size in args.batch:
        one = found[str(size)] = measured(engines, size, args)
        rates, fixed = one["rates"], one["fixed"]
        one["speedup"] = {side: ratio(rates, side, "none") for side in ("fixed", "adaptive")}
        one["adaptive_to_better"] = ratio(rates, "adaptive", "none", "fixed")
        rows.append(
            [
                size,
                median(rates["none"]),
                one["speedup"]["fixed"],
                one["speedup"]["adaptive"],
                one["adaptive_to_better"],
                fixed["tokens_per_step"],
                one["adaptive"]["tokens_per_step"],
                " ".join(f"{share:.2f}" for share in fixed["accepted_per_position"]),
            ]
        )
    columns = [
        "batch", "none tokens/s", f"fixed k={args.draft_tokens}", "adaptive", "adaptive / better", "tokens/step fixed",
        "tokens/step adaptive", "accepted by position",
    ]  # fmt: skip
    print_table(f"speculation by {args.method}, temperature {args.temperature}", columns, rows)
    common.save(args, {"sides": found})


if __name__ == "__main__":
    main()
