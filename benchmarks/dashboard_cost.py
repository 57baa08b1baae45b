"""What the dashboard costs: CPU time for viewers of an idle server, and throughput with viewers and without.

Idle: CPU seconds of the server's processes per second, with `--viewers` readers of /v1/live and without, in turns.
Loaded: rounds of `--streams` requests on the same server with viewers and without, in turns, and on one with
`--no-dashboard`, which records nothing; the others are stopped meanwhile. Ratios are of rounds beside each other.

    python benchmarks/dashboard_cost.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import common
from http_cost import running, streams

from jaxserve.report.table import print_table

TICK = os.sysconf("SC_CLK_TCK")


def cpu(group: int) -> float:
    """Return the CPU seconds that the living processes of a group have used."""
    total = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / TICK


@contextmanager
def viewers(url: str, count: int) -> Iterator[None]:
    """Read the feed in `count` threads within the context."""
    over = threading.Event()

    def read() -> None:
        with urllib.request.urlopen(f"{url}/v1/live") as response:
            while not over.is_set():
                response.readline()

    threads = [threading.Thread(target=read, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def idle(server: common.Server, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return CPU seconds per second of each turn."""
    found: dict[str, list[float]] = {"alone": [], "viewed": []}
    for _ in range(args.turns):
        for name, count in (("alone", 0), ("viewed", args.viewers)):
            with viewers(server.url, count):
                time.sleep(1.0)
                began, used = time.perf_counter(), cpu(server.pid)
                time.sleep(args.seconds)
                found[name].append((cpu(server.pid) - used) / (time.perf_counter() - began))
    return found


def loaded(seen: common.Server, off: common.Server, args: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Return tokens and CPU seconds of each round, by side. One round first is not counted."""
    rounds = []
    for number in range(args.repeats + 1):
        row: dict[str, dict[str, float]] = {}
        for name, server, count in (("alone", seen, 0), ("viewed", seen, args.viewers), ("off", off, 0)):
            with running(server.pid), viewers(server.url, count):
                used = cpu(server.pid)
                seconds, _ = asyncio.run(streams(server.url, args, number))
                row[name] = {"tokens_per_s": args.streams * args.tokens / seconds, "cpu_s": cpu(server.pid) - used}
        rounds.append(row)
    return rounds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, default=3, help="readers of the feed [%(default)s]")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one idle turn [%(default)s]")
    parser.add_argument("--turns", type=int, default=4, help="idle turns [%(default)s]")
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests [%(default)s]")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an output [%(default)s]")
    parser.add_argument("--repeats", type=int, default=9, help="rounds [%(default)s]")
    common.add_output(parser, "dashboard_cost")
    args = parser.parse_args()
    flags = ["--max-num-seqs", str(args.streams), "--max-model-len", str(args.prompt + args.tokens + 2)]
    flags += [
        "--warmup",
        "full",
        "--no-enable-prefix-caching",
        "--disable-log-stats",
        "--ttft-slo",
        "1000s",
        "--tpot-slo",
        "100s",
    ]
    with ExitStack() as stack:
        seen = stack.enter_context(common.server(flags))
        turns = idle(seen, args)
        os.killpg(seen.pid, signal.SIGSTOP)
        stack.callback(os.killpg, seen.pid, signal.SIGCONT)
        off = stack.enter_context(common.server([*flags, "--no-dashboard"]))
        os.killpg(off.pid, signal.SIGSTOP)
        stack.callback(os.killpg, off.pid, signal.SIGCONT)
        rounds = loaded(seen, off, args)
    alone, viewed = (median(turns[name]) for name in ("alone", "viewed"))
    print_table(
        f"CPU seconds per second, idle, {args.viewers} viewers",
        ("without", "with", "difference"),
        [(f"{alone:.4f}", f"{viewed:.4f}", f"{viewed - alone:.4f}")],
    )
    table = []
    for name, base in (("alone", "off"), ("viewed", "alone")):
        speed, work = (median(row[name][key] / row[base][key] for row in rounds) for key in ("tokens_per_s", "cpu_s"))
        table.append((f"{name} / {base}", f"{speed:.3f}", f"{work:.3f}"))
    print_table(f"{len(rounds)} rounds of {args.streams} streams", ("sides", "tokens/s", "CPU seconds"), table)
    common.save(args, {"idle": turns, "rounds": rounds})


if __name__ == "__main__":
    main()
