"""`jaxserve profile`: measure a model's step times on this machine, and write a latency preset."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from math import inf
from pathlib import Path

from jaxserve.cli import flags
from jaxserve.cli.fit import COLUMNS, preset_text
from jaxserve.errors import InvalidValue
from jaxserve.report.progress import bar
from jaxserve.report.table import print_table
from jaxserve.sched.perf.buckets import Padded
from jaxserve.sched.perf.fit import fit
from jaxserve.sched.perf.registry import Step
from jaxserve.yamlio import convert

DESCRIPTION = """Measure a model's step times on this machine: decodes by rows and context, prompt chunks by size and
prefix, and mixed steps, --runs times each (Kairos measures its table 100 times)."""
EPILOG = """examples:
  jaxserve profile --out mine.yaml                                  # the demo model
  jaxserve profile --model Qwen/Qwen3-8B --mesh 1x2 --out h200.yaml --steps h200.csv
then
  jaxserve serve --perf mine.yaml                    # use the preset from the first step
  jaxserve simulate --latency mine.yaml --qps 2,3,4  # simulate the same model
  jaxserve fit h200.csv                              # errors of each step-time model on these steps

All flags of `jaxserve serve` that affect a step apply.
"""
RUNS = 100


def add_arguments(parser: flags.TeachingParser) -> None:
    parser.description, parser.epilog, parser.usage = DESCRIPTION, EPILOG, "%(prog)s [MODEL] [--out FILE] [flags]"
    parser.first = ("out", "steps", "runs", "time", "model", "mesh", "quantization", "max_model_len", "config")
    group = parser.add_argument_group("measurement and output")
    group.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"runs of each step [{RUNS}]")
    group.add_argument("--time", metavar="TIME", help="stop after this time, as in 10min [when all runs are done]")
    group.add_argument("--out", type=Path, metavar="FILE", help="write a latency preset to this file")
    group.add_argument(
        "--steps", type=Path, metavar="FILE", help="write the measured steps to this file, as CSV for `jaxserve fit`"
    )
    flags.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run the measurement. Raises InvalidValue for invalid settings."""
    if args.runs < 1:
        raise InvalidValue(f"runs={args.runs} must be at least 1", "runs")
    seconds = inf if args.time is None else float(convert(args.time, float))
    if not seconds > 0:
        raise InvalidValue(f"time={args.time!r} must be above 0", "time")
    for name in ("out", "steps"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            raise InvalidValue(f"{name}={str(path)!r}: folder {str(path.parent)!r} does not exist", name)
    config = flags.config_of(args)

    from jaxserve.engine.startup import assemble, profile  # imports jax, so only now

    with bar("building") as progress:
        built = assemble.build(config, progress)
    recipe = assemble.plain_recipe(config, built)
    with bar("measuring step times") as progress:
        points = profile.measured(
            built.executors[0],
            built.limits,
            built.max_model_len,
            recipe.buckets,
            seconds,
            runs=args.runs,
            progress=progress,
        )
    plain = [step for step in points if not step[0].drafts]
    fitted = fit(plain, recipe.p_moe, recipe.buckets)
    form = Padded(fitted.coefficients, recipe.buckets)
    print_table(
        f"{config.names[0]} on {recipe.device}: {len(points)} steps measured, median of up to {args.runs} runs",
        ["prompt tokens", "after", "decoding rows", "longest context", "ms", "fitted ms"],
        [
            (load.prefill, load.prefix, load.decode, load.longest, 1e3 * seconds, 1e3 * form.step_time(load))
            for load, seconds in sorted(plain)
        ],
    )
    errors = ", ".join(f"{name} {error:.1%}" for name, error in fitted.by_kind.items())
    print(f"general form of padded steps: off by {fitted.mape:.1%} on average ({errors})")
    if args.steps is not None:
        _write_steps(args.steps, points)
    if args.out is not None:
        limits, spec = built.limits, built.config.spec
        pools = sum(int(leaf.nbytes) for pool in built.executors[0].state.pools for leaf in pool)
        text = preset_text(
            args.out.stem,
            plain,
            fitted,
            recipe,
            source=f"`jaxserve profile --runs {args.runs}`",
            tensor_parallel=built.config.mesh.tp,
            kv_bytes_per_token=pools // (limits.pages * limits.page_size),
            kv_tokens=limits.pages * limits.page_size,
            page_size=limits.page_size,
            layers=spec.layers,
        )
        args.out.write_text(text, encoding="utf-8")
        print(f"wrote {args.out}: jaxserve serve --perf {args.out}, jaxserve simulate --latency {args.out}")
    return 0


def _write_steps(path: Path, points: Sequence[Step]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((*load, seconds) for load, seconds in points)
    print(f"wrote {path}")
