"""Kill engines of a server amid streams: every stream must end with the tokens of an undisturbed run.

A server with `--replicas` engines of the demo model serves `--streams` requests, greedy and sampled with seeds, a
third of them with a JSON schema, undisturbed. Then the same requests run again `--kills` times, and at a random
moment one engine gets SIGKILL, or SIGSTOP; it must be back before the next round. Printed for each round: how many
requests continued elsewhere, and how long streams stood still: the longest gap between two chunks of a stream, beside
that of the undisturbed run.

    python benchmarks/failover.py
    python benchmarks/failover.py --ray local       # engines in a Ray cluster of this machine
    python benchmarks/failover.py --signal STOP --kills 1    # an engine that hangs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import common

from jaxserve.report.table import print_table

LIMITS = (
    "--mesh", "2x1", "--max-model-len", "256", "--max-num-seqs", "32", "--max-num-batched-tokens", "128",
    "--kv-cache-memory", "128MiB", "--disable-log-stats", "--ttft-slo", "1000s", "--tpot-slo", "100s",
)  # fmt: skip
# An array that no output reaches the end of, so that all have their number of tokens.
ITEM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 500}
PATIENCE = 120.0  # seconds until a killed engine must be back


@dataclass
class Stream:
    """What came of one request."""

    tokens: list[str] = field(default_factory=list)
    reason: str | None = None
    error: str = ""
    gap: float = 0.0  # longest time between two chunks, seconds

    def same(self, other: Stream) -> bool:
        return (self.tokens, self.reason, self.error) == (other.tokens, other.reason, "")


def bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the requests: half greedy, half sampled with seeds, and a third of each with a JSON schema."""
    draw = random.Random(args.seed)
    return [
        {
            "prompt": [draw.randrange(8, 4000) for _ in range(draw.randint(4, 60))],
            "max_tokens": draw.randint(args.tokens // 2, args.tokens),
            "temperature": float(number % 2),
            "seed": number,
            "ignore_eos": True,
            "logprobs": 0,  # names each token, also those without text
            "stream": True,
            **({"guided_json": SCHEMA} if number % 3 == 0 else {}),
        }
        for number in range(args.streams)
    ]


async def stream(session: Any, url: str, body: dict[str, Any], begun: asyncio.Event) -> Stream:
    """Read one stream to its end."""
    made, last = Stream(), time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            made.error = f"HTTP {response.status}: {await response.text()}"
            return made
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                made.error = event["error"]["message"]
                continue
            now = time.perf_counter()
            if made.tokens:
                made.gap = max(made.gap, now - last)
            last = now
            (choice,) = event["choices"]
            made.tokens += (choice["logprobs"] or {"tokens": ()})["tokens"]
            made.reason = choice["finish_reason"] or made.reason
            begun.set()
    return made


async def round_(url: str, asked: Sequence[dict[str, Any]], kill: Any = None) -> list[Stream]:
    """Run all requests at once; `kill` is called once the first of them has begun."""
    import aiohttp

    begun, timeout = asyncio.Event(), aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=len(asked))
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        running = [asyncio.ensure_future(stream(session, url, body, begun)) for body in asked]
        if kill is not None:
            await begun.wait()
            await kill()
        return await asyncio.gather(*running)


def metric(url: str, name: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"jaxserve:{name}{{"))


def read(path: Path) -> str:
    """Return the text of a file, or nothing if its process or thread has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children(tasks: Path) -> list[str]:
    """Return the children of a process, which any of its threads may have started."""
    try:
        return [child for task in tasks.iterdir() for child in read(task / "children").split()]
    except FileNotFoundError:
        return []


def engines(pid: int) -> list[int]:
    """Return the processes of the engines below a process: those that `spawn` has started, or Ray's actors."""
    made = []
    for child in map(int, children(Path(f"/proc/{pid}/task"))):
        command = read(Path(f"/proc/{child}/cmdline"))
        if "spawn_main" in command or command.startswith("ray::EngineActor"):
            made.append(child)
        else:
            made += engines(child)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="engines [%(default)s]")
    parser.add_argument("--ray", metavar="ADDRESS", help="engines in a Ray cluster, see `jaxserve serve --ray`")
    parser.add_argument("--streams", type=int, default=50, help="concurrent requests [%(default)s]")
    parser.add_argument("--tokens", type=int, default=150, help="most tokens of an output [%(default)s]")
    parser.add_argument("--kills", type=int, default=10, help="rounds with a killed engine [%(default)s]")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL", help="STOP: it hangs [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and moments [%(default)s]")
    common.add_output(parser, "failover")
    args = parser.parse_args()
    if args.ray:
        common.name_output(parser, args, "failover_ray")
    draw, asked, rows = random.Random(args.seed), bodies(args), list[dict[str, Any]]()
    placed = [] if args.ray is None else ["--ray", args.ray]
    with common.server(["--replicas", str(args.replicas), *placed, *LIMITS]) as server:
        asyncio.run(round_(server.url, asked))  # the first round pays one-time costs
        calm_began = time.perf_counter()
        calm = asyncio.run(round_(server.url, asked))
        seconds = time.perf_counter() - calm_began
        wrong = [one.error for one in calm if one.error or len(one.tokens) == 0]
        if wrong:
            raise SystemExit(f"the undisturbed run failed: {wrong[0]}")
        for number in range(args.kills):
            alive = engines(server.pid)
            victim, moment = draw.choice(alive), draw.uniform(0.0, 0.8 * seconds)

            async def kill(victim: int = victim, moment: float = moment) -> None:
                await asyncio.sleep(moment)
                os.kill(victim, getattr(signal, f"SIG{args.signal}"))

            before = metric(server.url, "continued_requests_total")
            found = asyncio.run(round_(server.url, asked, kill))
            gaps = sorted(one.gap for one in found)
            rows.append(
                {
                    "round": number + 1,
                    "moment_s": moment,
                    "continued": int(metric(server.url, "continued_requests_total") - before),
                    "equal": sum(one.same(whole) for one, whole in zip(found, calm, strict=True)),
                    "errors": [one.error for one in found if one.error][:3],
                    "gap_p50_ms": 1e3 * median(gaps),
                    "gap_max_ms": 1e3 * gaps[-1],
                }
            )
            end = time.monotonic() + PATIENCE
            while victim in engines(server.pid) or metric(server.url, "replicas_ready") < args.replicas:
                if time.monotonic() > end:
                    raise SystemExit(f"the killed engine is not back after {PATIENCE:g} s: see {server.log}")
                time.sleep(0.1)
    quiet = sorted(1e3 * one.gap for one in calm)
    table = [
        (one["round"], f"{one['moment_s']:.2f}", one["continued"], f"{one['equal']} of {args.streams}",
         one["gap_p50_ms"], one["gap_max_ms"])
        for one in rows
    ]  # fmt: skip
    table.insert(0, ("undisturbed", "", "", "", median(quiet), quiet[-1]))
    heads = ("round", "killed after, s", "continued", "equal streams", "longest gap p50, ms", "max, ms")
    print_table(f"{args.streams} streams, {args.replicas} replicas{' in Ray' * bool(args.ray)}", heads, table)
    common.save(args, {"seconds": seconds, "gaps_undisturbed_ms": quiet, "rounds": rows})
    if any(one["equal"] < args.streams for one in rows):
        raise SystemExit("streams differ from the undisturbed run")


if __name__ == "__main__":
    main()
