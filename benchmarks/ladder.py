"""Measure what the sizes of prompt programs cost: padding, goodput in the simulator, and prefill on this machine.

    python benchmarks/ladder.py                 # the Azure traces: three tables and JSON
    python benchmarks/ladder.py --no-served     # without the engine

A step is padded to the smallest program that holds it. `fourfold` has programs of 64, 128, 512, 2048 and 8192 tokens,
`fine` those of the engine (64, 96, 128, 192, ...), and `fine, filled` lets the scheduler fit chunks to them.

padding: the share of computed tokens that are tokens of a prompt, if each prompt of the trace runs alone in chunks of
the budget. simulated: goodput (requests/s that attain both objectives for 90 %) of a policy on one instance; the trace
is stretched to the rate. served: prompt tokens/s of the demo model, one prompt at a time and four at a time, with one
output token each; rounds alternate between the systems.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from common import add_output, clustered, save

from jaxserve.config import ServeConfig, load_yaml, preset
from jaxserve.engine.programs.inputs import LADDER, prompt_sizes
from jaxserve.engine.startup.assemble import Machine, assemble
from jaxserve.report import progress
from jaxserve.report.table import print_table
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.perf.buckets import Buckets
from jaxserve.sched.sim import Arrival
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Options
from jaxserve.sched.sim.sweep import goodput_search
from jaxserve.sched.sim.traces import load_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces" / "azure"
FILES = {
    "conversation": TRACES / "AzureLLMInferenceTrace_conv.head40min.csv.gz",
    "code": TRACES / "AzureLLMInferenceTrace_code.head38min.csv",
}
COARSE = (64, 128, 512, 2048, 8192)
BUDGETS = (512, 2048, 8192)
DECODES = (1, 4, 8, 16, 32, 64, 128, 256)
POLICIES = ("sarathi:tokens=2048", "vllm", "unified")
SERVED = {"fourfold": (COARSE, False), "fine": (LADDER, False), "fine, filled": (LADDER, True)}
PROMPTS = 60  # of the trace, served in a round
CHUNK, LENGTH = 2048, 2048  # served: tokens of the largest step and of the longest request
STREAMS = (1, 4)


def useful(prompts: Sequence[int], ladder: Sequence[int], most: int) -> float:
    """Return the share of computed tokens that prompts need, each alone in chunks of `most` tokens."""
    made = prompt_sizes(ladder, most)
    padded = sum(next(size for size in made if size >= chunk) for prompt in prompts for chunk in chunks(prompt, most))
    return sum(prompts) / padded


def chunks(prompt: int, most: int) -> Iterator[int]:
    for start in range(0, prompt, most):
        yield min(most, prompt - start)


def simulated(load: Sequence[Arrival], policy: str) -> dict[str, float]:
    """Return the goodput of a policy with each ladder."""
    latency = load_yaml(preset("latency", "llama3-8b-a800"), Latency)
    found = {}
    for name, (ladder, fill) in SERVED.items():
        padded = replace(latency, buckets=Buckets(DECODES, prompt_sizes(ladder, 8192)))
        (best,) = goodput_search(
            load, [policy], "1x1", padded, options=Options(fill=fill, perf="general"), tolerance=0.01, start=1.0
        ).values()
        found[name] = best.rate
    return found


async def serve(machine: Machine, prompts: Sequence[int], streams: int) -> float:
    """Return the prompt tokens/s of requests of one output token, `streams` of which are present at any time."""
    ended: list[Request] = []
    left, ids = list(reversed(prompts)), count()

    async with clustered(machine, ended) as cluster:

        async def stream() -> None:
            while left:
                size, id, done = left.pop(), next(ids), asyncio.Event()
                prompt = tuple((id * 7919 + position * 104729) % 4000 + 8 for position in range(size))
                params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
                cluster.submit(
                    Request(id, prompt, params, NO_SLO, machine.now(), seed=id),
                    lambda delta, done=done: done.set() if delta.finish_reason else None,
                )
                await done.wait()

        began = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        return sum(prompts) / (time.perf_counter() - began)


def served(prompts: Sequence[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return prompt tokens/s by number of streams and system, one figure a round."""
    config = ServeConfig(
        mesh="1x1", max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=CHUNK, enable_prefix_caching=False
    )
    built = {ladder: assemble(config, lambda *told: None, ladder=ladder) for ladder in (COARSE, LADDER)}
    found: dict[int, dict[str, list[float]]] = {streams: {name: [] for name in SERVED} for streams in STREAMS}
    for number in range(rounds):
        for name, (ladder, fill) in sorted(SERVED.items(), reverse=number % 2 == 1):
            one = built[ladder]
            limits = one.limits if fill else replace(one.limits, stairs=())
            for streams in STREAMS:
                found[streams][name].append(asyncio.run(serve(one.serving(config, limits), prompts, streams)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=FILES, default="conversation", help="whose prompts are served and simulated")
    parser.add_argument("--requests", type=int, default=400, help="simulated requests [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="served rounds [%(default)s]")
    parser.add_argument("--no-served", action="store_true", help="do not run the engine")
    add_output(parser, "ladder")
    args = parser.parse_args()
    absent = [str(path) for path in FILES.values() if not path.exists()]
    if absent:
        parser.error(f"the traces are not here: {', '.join(absent)}")
    loads = {name: list(load_trace(path, slo=SLO(2.0, 0.1))) for name, path in FILES.items()}
    found: dict[str, Any] = {"padding": padding(loads), "simulated": {}}
    load = loads[args.trace][: args.requests]
    with progress.bar("simulated policies") as tell:
        for done, policy in enumerate(POLICIES):
            tell(done, len(POLICIES), policy)
            found["simulated"][policy] = simulated(load, policy)
    rows = [[policy, *by.values(), by["fine, filled"] / by["fourfold"]] for policy, by in found["simulated"].items()]
    title = f"goodput, requests/s: {args.trace}, Llama-3-8B on an A800, simulated"
    print_table(title, ["policy", *SERVED, "filled / fourfold"], rows)
    if not args.no_served:
        prompts = [min(one.prompt_tokens, LENGTH - 1) for one in load[:PROMPTS]]
        found["served"] = served(prompts, args.rounds)
        rows = [
            [streams, *(median(rates) for rates in by.values()), ratio(by, "fine"), ratio(by, "fine, filled")]
            for streams, by in found["served"].items()
        ]
        names = ["streams", *SERVED, "fine / fourfold", "filled / fourfold"]
        print_table(f"prompt tokens/s: {args.trace}, {PROMPTS} prompts, demo model", names, rows)
    save(args, found)
    return 0


def ratio(by: dict[str, list[float]], name: str) -> float:
    """Return the median over rounds of a system's rate relative to the fourfold ladder's in the same round."""
    return median(mine / base for mine, base in zip(by[name], by["fourfold"], strict=True))


def padding(loads: dict[str, list[Arrival]]) -> dict[str, dict[int, dict[str, float]]]:
    """Print and return the useful share of computed tokens, by trace, budget and ladder."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    rows = []
    for name, load in loads.items():
        prompts = [one.prompt_tokens for one in load]
        for most in BUDGETS:
            by = {title: useful(prompts, ladder, most) for title, ladder in (("fourfold", COARSE), ("fine", LADDER))}
            found.setdefault(name, {})[most] = by
            rows.append([name, most, *by.values(), by["fine"] / by["fourfold"]])
    print_table("useful share of computed prompt tokens", ["trace", "step tokens", "fourfold", "fine", "ratio"], rows)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
