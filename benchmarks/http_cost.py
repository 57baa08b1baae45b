"""Throughput over HTTP beside that of `LLM.generate`, by the number of processes that serve HTTP.

The same prompts and lengths, greedy, `--streams` at a time: once offline, and once as streams of servers with
`--api-server-count` 0 (one process for all), 1, and 2. Sides alternate in one run, and those that are not being
measured are stopped. The load generator, `jaxserve bench`'s HTTP client, runs on the same cores.

    python benchmarks/http_cost.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import common
from compare_bench.sides import Side

from jaxserve.bench.client import Outcome, Target, open_sender
from jaxserve.bench.load import Call
from jaxserve.report.table import print_table

OFFLINE = "offline"


@contextmanager
def running(group: int) -> Iterator[None]:
    """Let the processes of a group run within the context; they are stopped before and after."""
    os.killpg(group, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGSTOP)


async def streams(url: str, args: argparse.Namespace, seed: int) -> tuple[float, list[Outcome]]:
    """Send all requests at once; return the seconds and the outcomes."""
    draw = random.Random(seed)
    calls = [
        Call(0.0, tuple(draw.randrange(8, 4000) for _ in range(args.prompt)), args.prompt, args.tokens)
        for _ in range(args.streams)
    ]
    async with open_sender(Target(url, "jaxserve-demo", objectives=False)) as sender:
        began = time.perf_counter()
        outcomes = await asyncio.gather(*(sender.send(call, began) for call in calls))
    wrong = [one.error for one in outcomes if one.error]
    if wrong:
        raise RuntimeError(f"{len(wrong)} requests failed, the first with: {wrong[0]}")
    return time.perf_counter() - began, outcomes


def measured(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each round, by side. One round first is not counted."""
    limits = ["--max-num-seqs", str(args.streams), "--max-model-len", str(args.prompt + args.tokens + 2)]
    limits += ["--no-enable-prefix-caching", "--disable-log-stats", "--ttft-slo", "1000s", "--tpot-slo", "100s"]
    settings: dict[str, Any] = {
        "model": str(common.DEMO), "vocabulary": 4096, "threads": os.cpu_count(), "rows": args.streams,
        "length": args.prompt + args.tokens + 2, "options": {"ttft_slo": "1000s", "tpot_slo": "100s"},
    }  # fmt: skip
    with ExitStack() as stack:
        offline = Side("jaxserve", "", settings)
        stack.callback(offline.close)
        servers = {}
        for count in args.fronts:
            servers[str(count)] = found = stack.enter_context(
                common.server(["--api-server-count", str(count), *limits])
            )
            stack.callback(os.killpg, found.pid, signal.SIGCONT)
            os.killpg(found.pid, signal.SIGSTOP)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in (OFFLINE, *servers)}
        for round_ in range(args.repeats + 1):
            answer = offline.run(args.streams, args.prompt, args.tokens, round_)
            tokens = args.streams * args.tokens
            rows[OFFLINE].append({"tokens_per_s": tokens / answer["seconds"]})
            for name, found in servers.items():
                with running(found.pid):
                    seconds, outcomes = asyncio.run(streams(found.url, args, round_))
                rows[name].append(
                    {
                        "tokens_per_s": tokens / seconds,
                        "ttft_ms": 1e3 * median(one.ttft for one in outcomes),
                        "tpot_ms": 1e3 * median(one.tpot for one in outcomes),
                    }
                )
    return {name: found[1:] for name, found in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="concurrent requests [%(default)s]")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an output [%(default)s]")
    parser.add_argument("--fronts", type=int, nargs="+", default=[0, 1, 2], help="--api-server-count [0 1 2]")
    parser.add_argument("--repeats", type=int, default=7, help="rounds [%(default)s]")
    common.add_output(parser, "http_cost")
    args = parser.parse_args()
    rows = measured(args)
    base = [one["tokens_per_s"] for one in rows[OFFLINE]]
    table = []
    for name, found in rows.items():
        ratio = median(one["tokens_per_s"] / whole for one, whole in zip(found, base, strict=True))
        first, each = (median(one[key] for one in found) if key in found[0] else "" for key in ("ttft_ms", "tpot_ms"))
        table.append((name, round(median(one["tokens_per_s"] for one in found)), f"{ratio:.2f}", first, each))
    heads = ("processes for HTTP", "tokens/s", "of offline", "TTFT p50, ms", "TPOT p50, ms")
    print_table(f"{args.streams} streams of {args.tokens} tokens", heads, table)
    common.save(args, {"rounds": rows})


if __name__ == "__main__":
    main()
