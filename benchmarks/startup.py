"""Measure the time from the command to the open port, to the first 200 of /health, and the first TTFTs.

Each run is a new process. `cold` has an empty compilation cache, `warm` the cache that the cold run left. Then ten
requests are sent one after another: if the first is slower than the tenth, the warm-up has missed a program.
`x imports` is the ratio to `python -c "import jax, transformers"`, the median of five in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import common

from jaxserve.bench.client import Outcome, Target, open_sender
from jaxserve.bench.discover import discover
from jaxserve.bench.drive import drive
from jaxserve.bench.load import random_calls
from jaxserve.report.table import print_table


def requests(url: str, args: argparse.Namespace) -> list[Outcome]:
    """Send requests one after another on one connection."""

    async def run() -> list[Outcome]:
        target, vocabulary = await discover(Target(url, ""), ())
        calls = random_calls(args.requests, input_len=args.prompt, output_len=args.tokens, vocabulary=vocabulary)
        async with open_sender("http", target) as sender:
            return [(await drive([call], sender)).outcomes[0] for call in calls]

    return asyncio.run(run())


def measure(label: str, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    with common.server(args.flags, cache=cache) as server:
        outcomes = requests(server.url, args)
    failed = [outcome.error for outcome in outcomes if not outcome.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    ttfts = [outcome.ttft for outcome in outcomes]
    return {
        "cache": label,
        "opened_s": server.opened,
        "health_s": server.seconds,
        "ttft_first_ms": ttfts[0] * 1e3,
        "ttft_tenth_ms": ttfts[-1] * 1e3,
        "ttft_median_ms": median(ttfts) * 1e3,
        "tpot_median_ms": median(outcome.tpot for outcome in outcomes) * 1e3,
        "ttfts_ms": [ttft * 1e3 for ttft in ttfts],
    }


def import_time() -> float:
    """Return the seconds in which a new process imports what every engine needs."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import jax, transformers"], check=True)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="warm starts after the cold one")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=16, metavar="TOKENS")
    common.add_output(parser, "startup")
    parser.add_argument("flags", nargs="*", default=["--mesh", "4x2"], help="server flags, after -- [--mesh 4x2]")
    args = parser.parse_args()
    imports = median(import_time() for _ in range(5))
    with tempfile.TemporaryDirectory() as folder:
        labels = ["cold", *["warm"] * args.repeats]
        rows = [measure(label, Path(folder), args) for label in labels]
    for row in rows:
        row |= {"opened_imports": row["opened_s"] / imports, "health_imports": row["health_s"] / imports}
    columns = {
        "cache": "compilation cache",
        "opened_s": "command to the open port, s",
        "opened_imports": "x imports",
        "health_s": "to /health, s",
        "health_imports": "x imports",
        "ttft_first_ms": "TTFT of request 1, ms",
        "ttft_tenth_ms": f"of {args.requests}, ms",
        "ttft_median_ms": "median TTFT, ms",
        "tpot_median_ms": "median TPOT, ms",
    }
    title = f"python -m jaxserve.run {' '.join(args.flags)}; imports take {imports:.2f} s"
    print_table(title, list(columns.values()), [[row[key] for key in columns] for row in rows])
    common.save(args, {"import_s": imports, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
