"""Compile whole models for a device that is not present, and report memory per device and compile time.

Every layer is compiled as in the engine: unrolled, with each kind of layer traced once. Programs: a decode step of
`--rows` rows, a prefill of 8,192 tokens, and sampling. Needs the packages of the `gate` extra, but no GPU.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import common

DEFAULT = ("llama3-70b:4", "qwen3-30b-a3b:4", "minimax-m2:4")
COLUMNS = (
    "program",
    "weights GB",
    "KV pool GB",
    "temp GB",
    "code MB",
    "total GB",
    "fits",
    "graphs",
    "compile s",
    "cpu s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=DEFAULT, metavar="MODEL:TP", help="%(default)s")
    parser.add_argument("--target", default="h200", help="[%(default)s]")
    parser.add_argument("--rows", type=int, default=64, help="rows of the decode step [%(default)s]")
    parser.add_argument("--jobs", type=int, default=1, help="programs compiled at once [%(default)s]")
    parser.add_argument("--limit", type=float, default=7200.0, help="timeout of one program in seconds [%(default)s]")
    common.add_output(parser, "compiles")
    args = parser.parse_args()
    from pallas_kernels.gate.targets import TARGETS, prepare

    target = TARGETS[args.target]
    if (missing := target.missing()) is not None:
        parser.error(missing)
    prepare(target)
    rows = run(args, target)
    from jaxserve.report.table import print_table

    print_table(
        f"{target.name}, {target.compiler()}, per device", COLUMNS, [list(row.values())[: len(COLUMNS)] for row in rows]
    )
    common.save(args, {"compiler": target.compiler(), "memory": target.memory, "programs": rows})


def run(args: argparse.Namespace, target: Any) -> list[dict[str, Any]]:
    """Compile every program, and return one row per program."""
    from jaxserve.capacity.costs import Costs
    from jaxserve.engine.startup import aot
    from pallas_kernels.gate.compiling import compile_all

    weights: dict[str, int] = {}
    cases: list[Any] = []
    for named in args.models:
        model, _, tp = named.partition(":")
        served = aot.Served(model, int(tp or 1), rows=args.rows)
        costs = Costs.of(aot.published_spec(model), served.tp, aot.DTYPE)
        for case in aot.served_steps(served):
            cases.append(case)
            weights[case.name] = costs.weights
    rows: list[dict[str, Any]] = []

    def tell(case: Any, outcome: Any) -> None:
        rows.append(row(case.name, weights[case.name], outcome, target.memory))
        print(json.dumps(rows[-1]), flush=True)

    compile_all(cases, target, jobs=args.jobs, tell=tell, limit=args.limit)
    return rows


def row(name: str, weights: int, outcome: Any, memory: int) -> dict[str, Any]:
    if isinstance(outcome, str):
        return {**dict.fromkeys(COLUMNS), "program": name, "fits": False, "error": outcome}
    gb = 1e9
    pool = outcome.alias if not name.endswith("draw") else 0
    read = weights if pool else outcome.arguments
    found = dict(
        zip(
            COLUMNS,
            (
                name, read / gb, pool / gb, outcome.temp / gb, outcome.code / 1e6, outcome.memory / gb,
                outcome.memory <= memory, outcome.buffers, outcome.seconds, outcome.processor,
            ),
            strict=True,
        )
    )  # fmt: skip
    return {**found, "figures": {key: value for key, value in asdict(outcome).items() if key != "copies"}}


if __name__ == "__main__":
    main()
