"""Measure the throughput floor in simulation: every policy at saturation, compared with plain batching.

    python benchmarks/throughput_floor.py                            # all policies, presets, regimes: a table and JSON
    python benchmarks/throughput_floor.py --split                    # two prefill and two decode instances
    python benchmarks/throughput_floor.py --policy unified --preset cpu-185m --regime default

Plain batching is `vllm` on one mixed instance, and `distserve` with split roles, where `vllm` makes the same plans. A
table cell is the ratio of output tokens per second to plain batching's. If it is below 0.95, the cell adds the attained
requests per second of the policy and of plain batching. `starved` is the maximum time that a running decode was left
out, in steps of all rows and a whole chunk of prefill. sched/sim/floor.py defines the regimes of objectives.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import ROOT, add_output, save

from jaxserve.config import load_yaml, preset
from jaxserve.report.table import print_table
from jaxserve.sched import policies
from jaxserve.sched.sim.floor import CPU, LEAST, REGIMES, Floor, floor, kept, plain
from jaxserve.sched.sim.latency import Latency

VARIANTS = [
    "fairbatching:budget=fixed",
    "fairbatching:budget=tokens",
    "fairbatching:on_time_set",
    "kairos:literal",
    "prefill=sedf,decode=kairos",
    "slos_serve:no_admit",
]


def presets() -> dict[str, Latency]:
    """Return all latency presets, and step times of a CPU."""
    names = sorted(file.stem for file in (ROOT / "configs" / "latency").glob("*.yaml"))
    return {CPU.name: CPU} | {name: load_yaml(preset("latency", name), Latency) for name in names}


def cell(found: Floor, base: Floor) -> str:
    share = found.tokens / base.tokens
    if share >= LEAST:
        return f"{share:.2f}"
    return f"{share:.2f} ({found.attained:.3g} / {base.attained:.3g}){'' if kept(found, base) else ' !'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="*", default=[*policies.names(), *VARIANTS])
    parser.add_argument("--preset", nargs="*", default=list(presets()))
    parser.add_argument("--regime", nargs="*", default=list(REGIMES), choices=REGIMES)
    parser.add_argument("--split", action="store_true", help="two prefill and two decode instances")
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser, "throughput_floor")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.preset:
        latency = presets()[name]
        bases = {one: floor(plain(args.split), latency, one, split=args.split, seed=args.seed) for one in args.regime}
        table: list[list[str]] = []
        for policy in args.policy:
            cells, longest = [], 0.0
            for regime, base in bases.items():
                found = floor(policy, latency, regime, split=args.split, seed=args.seed)
                longest = max(longest, found.gap / found.full)
                cells.append(cell(found, base))
                rows.append(
                    {
                        "preset": name,
                        "regime": regime,
                        "policy": policy,
                        "tokens": found.tokens / base.tokens,
                        "attained": found.attained,
                        "attained_plain": base.attained,
                        "starved": found.gap / found.full,
                        "kept": kept(found, base),
                    }
                )
            table.append([policy, *cells, f"{longest:.2f}"])
        print_table(name, ["policy", *args.regime, "starved"], table)
    broken = [row for row in rows if not row["kept"]]
    print(f"{len(rows)} cells, {len(broken)} below the floor")
    save(args, {"rows": rows, "below": len(broken)})


if __name__ == "__main__":
    main()
