"""Serve what `jaxserve plan` answers, and compare the attainment that it predicts with the one that is measured.

    python benchmarks/plan_served.py

Each round serves the demo model as the plan of the round before says, fits step times to the journal of the run, and
plans again. The run is compared with both plans: the one with its own step times shows what the simulator is off by,
the one before also how much the machine changed its speed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import common
import yaml

from jaxserve.report.table import print_table

WORKLOAD = """\
name: chat-and-retrieval
prompt: {kind: lognormal, mean: 200, std: 200, low: 16, high: 1500}
output: {kind: lognormal, mean: 60, std: 40, low: 4, high: 200}
"""


def run(*words: str) -> str:
    command = [sys.executable, "-m", "jaxserve", *words]
    return subprocess.run(command, cwd=common.ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def served(flags: list[str], args: argparse.Namespace, workload: Path, journal: Path) -> dict[str, Any]:
    """Serve the workload once, and return what the client saw."""
    with common.server([*flags, "--warmup", "full", "--journal", str(journal)]) as server:
        return common.bench(
            server.url,
            [
                *("--dataset-name", "workload", "--workload", str(workload), "--request-rate", str(args.qps)),
                *("--num-prompts", str(args.requests), "--seed", str(args.seed)),
            ],
        )


def planned(args: argparse.Namespace, workload: Path, journal: Path, preset: Path) -> dict[str, Any]:
    """Plan with the step times of a run. The goal is low: asked is what attainment is predicted."""
    run("fit", str(journal), "--out", str(preset))
    found = json.loads(
        run(
            "plan", "--devices", "cpu:1", "--qps", str(args.qps), "--workload", str(workload), "--latency", str(preset),
            "--num-requests", str(args.requests), "--attainment", "0.5", "--json",
        )
    )  # fmt: skip
    assert isinstance(found, dict)
    return found


def step_times(preset: Path) -> dict[str, float]:
    found = yaml.safe_load(preset.read_text())
    return {**found["coefficients"], "noise": found["noise"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="plans [%(default)s]")
    parser.add_argument("--qps", type=float, default=8.0, help="requests per second [%(default)s]")
    parser.add_argument("--requests", type=int, default=400, help="of each run, served and simulated [%(default)s]")
    parser.add_argument("--ttft", default="300ms", metavar="TIME", help="objective [%(default)s]")
    parser.add_argument("--tpot", default="25ms", metavar="TIME", help="objective [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep journals here")
    common.add_output(parser, "plan_served")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    flags, before = ["--mesh", "1x1"], 0.0
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder, "workload.yaml")
        workload.write_text(f"{WORKLOAD}ttft: {args.ttft}\ntpot: {args.tpot}\n", encoding="utf-8")
        for number in range(args.rounds + 1):  # the first one serves with the defaults, to learn step times
            journal, preset = args.keep or Path(folder), Path(folder, f"{number}.yaml")
            journal /= f"{number}.jsonl"
            found = served(flags, args, workload, journal)
            plan = planned(args, workload, journal, preset)
            answer = plan["best"]
            if number:
                row = {"set_up": " ".join(flags), "measured": found["slo_attainment"], "predicted": answer["attained"]}
                row |= {"before": before, "tpot_ms": found["mean_tpot_ms"], "step_times": step_times(preset)}
                rows.append(row)
                print(f"round {number}: {row}", file=sys.stderr, flush=True)
            before = answer["attained"]
            flags = shlex.split(plan["serve"])[4:]  # without --model, which names a folder of this machine
    heads = ("measured", "predicted", "before")
    table = [[f"{row[head]:.3f}" for head in heads] for row in rows]
    table.append([f"{mean(row[head] for row in rows):.3f}" for head in heads])
    print_table("", ["measured", "predicted with the run's step times", "with those of the run before"], table)
    common.save(args, {"rows": rows})


if __name__ == "__main__":
    main()
