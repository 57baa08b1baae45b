"""Simulate KV tiers on Mooncake's traces: the share of prompt tokens found in each tier, TTFT and goodput.

    python benchmarks/kv_tiers.py --requests 2000       # tables and JSON
    python benchmarks/kv_tiers.py --served              # also what tiers cost on this machine

hbm, host, disk: share of the prompt tokens found in the prefix caches alone, fetched from host memory, and from disk.
best: the share that a cache without limit would find. Bandwidths are those of `sched.sim.tiers.Tiers` (ASSUMED).

served: three engines of the demo model side by side (no tier, host memory, disk), which take turns in short rounds.
Output tokens/s without any hit, until the last page has been copied; and TTFT of prompts that come back after others
have evicted them. Ratios to the engine without tiers are means over rounds.
"""

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import add_output, save

from jaxserve.config import ServeConfig, load_yaml, preset
from jaxserve.engine.engine import Engine
from jaxserve.report.table import print_table
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.sim import Arrival
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Options
from jaxserve.sched.sim.simulate import simulate
from jaxserve.sched.sim.tiers import Tiers
from jaxserve.sched.sim.traces import load_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake"
FILES = {
    "conversation": TRACES / "conversation_trace.head40min.jsonl.gz",
    "synthetic": TRACES / "synthetic_trace.head12min.jsonl.gz",
}
GB, TB = 10**9, 10**12
STREAMS, TOKENS = 16, 64  # served: requests of a round, and their output tokens
POOL, AGAIN = 8, 4  # served: prompts that the pool holds, and those that come back in a round
SIZES = {
    "HBM alone": Tiers(),
    "+ 256 GB": Tiers(256 * GB),
    "+ 1 TB": Tiers(1 * TB),
    "+ 1 TB + 8 TB disk": Tiers(1 * TB, 8 * TB),
}


def best(arrivals: Sequence[Arrival]) -> float:
    """Return the share of prompt tokens that a cache without limit finds."""
    seen: set[Any] = set()
    found = total = 0
    for one in arrivals:
        total += one.prompt_tokens
        for name in one.hash_ids:
            found += int(one.block) if name in seen else 0
            seen.add(name)
    return found / total


def simulated(name: str, args: argparse.Namespace, latency: Latency) -> list[dict[str, Any]]:
    """Return a row for each size of the tiers."""
    arrivals = load_trace(FILES[name], slo=SLO(args.ttft, args.tpot), num_prompts=args.requests)
    most, rows = best(arrivals), []
    for label, tiers in SIZES.items():
        report = simulate(arrivals, args.policy, args.mesh, latency, options=Options(tiers=tiers, routing=args.routing))
        counters, hits, ttft = report.counters, report.tier_hits, report.summary.ttft
        rows.append(
            {
                "trace": name,
                "tiers": label,
                "hbm": (counters.prefix_hits - sum(hits.values())) / counters.prefix_queries,
                "host": hits.get("host", 0) / counters.prefix_queries,
                "disk": hits.get("disk", 0) / counters.prefix_queries,
                "best": most,
                "ttft_p50": ttft.p50,
                "ttft_p99": ttft.p99,
                "attained": report.summary.attained,
                "goodput": report.summary.request_goodput,
            }
        )
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
    return rows


# served on this machine


def ask(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Serve prompts together, and return the seconds."""
    ended: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    for prompt in prompts:
        engine.submit(NewRequest(prompt, params, NO_SLO), ended.put)
    left = len(prompts)
    while left:
        left -= ended.get().finish_reason is not None
    return time.perf_counter() - began


def drawn(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, 300) for _ in range(length)] for _ in range(count)]


def settle(engine: Engine) -> None:
    """Wait until the pages of ended requests have been copied to the tiers."""
    engine.run(engine.copied)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and its standard error."""
    return {"mean": mean(values), "se": stdev(values) / len(values) ** 0.5}


def costs(engines: Mapping[str, Engine], rounds: int) -> dict[str, Any]:
    """Return output tokens/s on prompts that share nothing, in turn, until the last page has been copied."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, rounds):  # the first round warms up
        names = list(engines)[:: 1 if turn % 2 else -1]
        for name in names:
            began = time.perf_counter()
            ask(engines[name], drawn(STREAMS, 128, 1000 + turn), TOKENS)
            settle(engines[name])
            if turn >= 0:
                found[name].append(STREAMS * TOKENS / (time.perf_counter() - began))
    ratios = {
        name: spread([one / alone for one, alone in zip(rates, found["none"], strict=True)])
        for name, rates in found.items()
    }
    return {"tokens_per_second": {name: spread(rates) for name, rates in found.items()}, "ratio": ratios}


def returning(engines: Mapping[str, Engine], rounds: int, length: int) -> dict[str, Any]:
    """Return the seconds to the first token of prompts that come back after others have evicted them, in turn."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, rounds):
        prompts, others = drawn(AGAIN, length, 2 * turn), drawn(POOL + 2, length, 2 * turn + 1)
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            engine = engines[name]
            for prompt in [*prompts, *others]:
                ask(engine, [prompt], 1)
                settle(engine)
            times = [ask(engine, [prompt], 1) for prompt in prompts]
            settle(engine)
            if turn >= 0:
                found[name].append(mean(times))
    ratios = {
        name: spread([one / alone for one, alone in zip(times, found["none"], strict=True)])
        for name, times in found.items()
    }
    return {"ttft": {name: spread(times) for name, times in found.items()}, "ratio": ratios}


def served(args: argparse.Namespace) -> dict[str, Any]:
    """Measure engines of the demo model side by side: what copies cost, and what fetches save."""
    length, room = args.length, 4 << 30
    config = ServeConfig(
        mesh="1x1", max_num_seqs=16, max_model_len=length + 64, kv_cache_memory=POOL * length * 6144, policy="vllm"
    )
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, dict[str, Any]] = {
            "none": {},
            "host": {"kv_host_memory": room},
            "disk": {"kv_disk": folder, "kv_disk_size": room},
        }
        engines = {name: Engine.start(replace(config, **own)) for name, own in settings.items()}
        result = {
            "prompt_tokens": length,
            "cost": costs({name: engines[name] for name in ("none", "host")}, args.rounds),
            "returning": returning(engines, args.rounds, length),
            "fetched": {name: engine.stats().prefix_fetch_pages for name, engine in engines.items()},
        }
        for engine in engines.values():
            engine.close()
    cost, back = result["cost"], result["returning"]
    rows = [
        [
            name,
            *(_shown(cost[kind].get(name), 1.0) for kind in ("tokens_per_second", "ratio")),
            _shown(back["ttft"][name], 1e3),
            _shown(back["ratio"][name], 1.0),
        ]
        for name in engines
    ]
    heads = ("tier", "tokens/s", "of none", f"TTFT of {length} tokens again, ms", "of none")
    print_table("served, mean and standard error", heads, rows)
    return result


def _shown(one: Mapping[str, float] | None, scale: float) -> str:
    if one is None:
        return ""
    digits = 3 if scale == 1.0 and one["mean"] < 10 else 1
    return f"{scale * one['mean']:.{digits}f} ± {scale * one['se']:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="of each trace [%(default)s]")
    parser.add_argument("--policy", default="vllm", help="[%(default)s]")
    parser.add_argument("--routing", default="auto", help="[the policy's]")
    parser.add_argument("--mesh", default="4x4", help="[%(default)s]")
    parser.add_argument("--latency", default="minimax-m2.5-h200-tp4", help="latency preset [%(default)s]")
    parser.add_argument("--ttft", type=float, default=10.0, help="objective in seconds [%(default)s]")
    parser.add_argument("--tpot", type=float, default=0.1, help="objective in seconds [%(default)s]")
    parser.add_argument("--simulated", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--served", action="store_true", help="also measure the demo model on this machine")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="served: rounds [%(default)s]")
    parser.add_argument("--length", type=int, default=960, metavar="N", help="served: prompt tokens [%(default)s]")
    add_output(parser, "kv-tiers")
    args = parser.parse_args()
    latency = load_yaml(preset("latency", args.latency), Latency)
    rows = [row for name in FILES if args.simulated for row in simulated(name, args, latency)]
    if rows:
        cells = [[f"{value:.3f}" if isinstance(value, float) else value for value in row.values()] for row in rows]
        print_table("prompt tokens found, and seconds", list(rows[0]), cells)
    save(args, {"simulated": rows, "served": served(args) if args.served else None})


if __name__ == "__main__":
    main()
