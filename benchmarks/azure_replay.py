"""Replay a production trace over HTTP under several policies.

Sends the first `--num-prompts` requests of the trace at their recorded arrival times. A small model on a CPU is slower
than the production system of the trace, so lengths are divided and times are multiplied by the given factors. All
policies run on a fresh server in each of `--repeats` rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import common

from jaxserve.report.table import print_table

KEYS = {
    "completed": "completed",
    "failed": "failed",
    "slo_attainment": "on time",
    "slo_attainment_token_weighted": "on time by tokens",
    "request_goodput": "on time per s",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "median TTFT, ms",
    "p99_ttft_ms": "p99 TTFT, ms",
    "median_tpot_ms": "median TPOT, ms",
    "p99_tpot_ms": "p99 TPOT, ms",
    "p99_client_lag_ms": "p99 client delay, ms",
}


def replay(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace on a fresh server with one policy, and return the JSON of `jaxserve bench`."""
    flags = [
        *("--trace", str(args.trace), "--num-prompts", str(args.num_prompts), "--client", args.client),
        *("--time-scale", str(args.time_scale), "--prompt-scale", str(args.prompt_scale)),
        *("--output-scale", str(args.output_scale), "--ttft-slo", args.ttft_slo, "--tpot-slo", args.tpot_slo),
        *("--num-warmups", "4", "--random-input-len", "32", "--random-output-len", "8"),
        *("--metadata", f"policy={policy}"),
    ]
    with common.server(["--mesh", args.mesh, "--policy", policy, *args.flags]) as server:
        return common.bench(server.url, flags)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="Azure LLM inference CSV or another trace"
    )
    parser.add_argument("--policies", nargs="+", default=["distserve", "kairos"])
    parser.add_argument("--mesh", default="4x2")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="factor that multiplies arrival times"
    )
    parser.add_argument("--prompt-scale", type=float, default=16.0, metavar="X", help="divisor of prompt lengths")
    parser.add_argument("--output-scale", type=float, default=16.0, metavar="X", help="divisor of output lengths")
    parser.add_argument("--ttft-slo", default="2s")
    parser.add_argument("--tpot-slo", default="100ms")
    parser.add_argument("--client", default="openai", choices=("openai", "http"))
    parser.add_argument("--repeats", type=int, default=1)
    common.add_output(parser, "azure_replay")
    parser.add_argument("flags", nargs="*", help="further server flags, after --")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    for _ in range(args.repeats):
        for policy in args.policies:
            runs[policy].append(replay(policy, args))
    rows = []
    for policy, found in runs.items():
        rows.append([policy, *(mean(run[key] for run in found) for key in KEYS)])
    scales = f"times × {args.time_scale:g}, prompts ÷ {args.prompt_scale:g}, outputs ÷ {args.output_scale:g}"
    title = f"{args.trace.name}, first {args.num_prompts}; {scales}; TTFT {args.ttft_slo}, TPOT {args.tpot_slo}"
    print_table(title, ["policy", *KEYS.values()], rows)
    common.save(args, {"runs": runs})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
