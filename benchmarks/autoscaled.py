"""Serve a burst with `--replicas 1 --max-replicas 2`: engines start and stop with the load, and no request fails.

Requests of the demo model arrive at a slow rate, then at a fast one, then at the slow one again. Printed for each
phase: requests, failures and TTFT, and when a second engine was wanted, served, and had stopped.

    python benchmarks/autoscaled.py
    python benchmarks/autoscaled.py --ray local       # engines in a Ray cluster of this machine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from statistics import median
from typing import Any

import common

from jaxserve.report.table import print_table

LIMITS = (
    "--mesh", "1x1", "--max-model-len", "512", "--max-num-seqs", "32", "--max-num-batched-tokens", "128",
    "--kv-cache-memory", "128MiB", "--disable-log-stats", "--admin-key", "key",
)  # fmt: skip
ADMIN = {"Authorization": "Bearer key"}
LOOKING = 0.25  # seconds between two looks at the replicas
STOPPED = 120.0  # seconds after the last request until the second engine must have stopped


async def ask(session: Any, url: str, body: dict[str, Any]) -> tuple[float, str]:
    """Read one stream to its end, and return its TTFT and what went wrong."""
    began, ttft, reason = time.perf_counter(), 0.0, None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            return 0.0, f"HTTP {response.status}: {await response.text()}"
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return ttft, str(event["error"]["message"])
            ttft = ttft or time.perf_counter() - began
            reason = event["choices"][0]["finish_reason"] or reason
    return ttft, "" if reason == "length" else f"finish_reason={reason}"


async def watch(session: Any, url: str, began: float, seen: list[tuple[float, int, list[str]]]) -> None:
    """Note each change of the number of replicas that are wanted, and of what each does."""
    while True:
        async with session.get(f"{url}/v1/admin/replicas", headers=ADMIN) as response:
            state = (await response.json())["scaling"]
        now = state["wanted"], state["standing"]
        if not seen or seen[-1][1:] != now:
            seen.append((time.perf_counter() - began, *now))
        await asyncio.sleep(LOOKING)


async def load(args: argparse.Namespace, url: str) -> tuple[list[dict[str, Any]], list[tuple[float, int, list[str]]]]:
    """Send the requests of all phases, wait until the second engine has stopped, and return both accounts."""
    import aiohttp

    draw, seen, rows = random.Random(args.seed), list[tuple[float, int, list[str]]](), []
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began = time.perf_counter()
        watching = asyncio.ensure_future(watch(session, url, began, seen))
        phases = []
        for rate in (args.slow, args.fast, args.slow):
            since, asked = time.perf_counter() - began, []
            while time.perf_counter() - began < since + args.phase:
                body = {
                    "prompt": [draw.randrange(8, 4000) for _ in range(args.prompt)], "max_tokens": args.tokens,
                    "ignore_eos": True, "stream": True,
                }  # fmt: skip
                asked.append(asyncio.ensure_future(ask(session, url, body)))
                await asyncio.sleep(draw.expovariate(rate))
            phases.append((rate, since, asked))
        for rate, since, asked in phases:
            answers = await asyncio.gather(*asked)
            ttfts, errors = (
                sorted(ttft for ttft, error in answers if not error),
                [error for _, error in answers if error],
            )
            rows.append(
                {
                    "rate": rate, "began_s": since, "requests": len(answers), "failed": len(errors),
                    "errors": errors[:3], "ttft_p50_s": median(ttfts), "ttft_max_s": ttfts[-1],
                }
            )  # fmt: skip
        end = time.perf_counter() + STOPPED
        while seen[-1][2].count("stopped") < 1 and time.perf_counter() < end:
            await asyncio.sleep(LOOKING)
        watching.cancel()
    return rows, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", metavar="ADDRESS", help="engines in a Ray cluster, see `jaxserve serve --ray`")
    parser.add_argument("--phase", type=float, default=25.0, help="seconds of each of three phases [%(default)s]")
    parser.add_argument("--slow", type=float, default=0.5, help="requests per second [%(default)s]")
    parser.add_argument("--fast", type=float, default=20.0, help="the same amid the run [%(default)s]")
    parser.add_argument("--prompt", type=int, default=240, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an output [%(default)s]")
    parser.add_argument("--delay", type=float, default=10.0, help="--downscale-delay [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals [%(default)s]")
    common.add_output(parser, "autoscaled")
    args = parser.parse_args()
    placed = [] if args.ray is None else ["--ray", args.ray]
    flags = ["--replicas", "1", "--max-replicas", "2", "--downscale-delay", f"{args.delay}s", *placed, *LIMITS]
    with common.server(flags) as server:
        rows, seen = asyncio.run(load(args, server.url))
    fields = ("rate", "began_s", "requests", "failed", "ttft_p50_s", "ttft_max_s")
    heads = ("requests/s", "from, s", "requests", "failed", "TTFT p50, s", "max, s")
    print_table(
        "a burst on 1 to 2 replicas", heads,
        [tuple(one[name] for name in fields) for one in rows],
    )  # fmt: skip
    print_table("replicas", ("at, s", "wanted", "standing"), [(at, wanted, ", ".join(all)) for at, wanted, all in seen])
    common.save(args, {"phases": rows, "replicas": [{"at_s": at, "wanted": n, "standing": all} for at, n, all in seen]})
    if any(one["failed"] for one in rows):
        raise SystemExit("requests failed")
    if "ready, ready" not in [", ".join(all) for _, _, all in seen] or "stopped" not in seen[-1][2]:
        raise SystemExit("no second engine has served, or it has not stopped")


if __name__ == "__main__":
    main()
