"""`jaxserve replay`: replay a journal, compare every plan, and simulate the same load."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.cli import timeline
from jaxserve.report.table import print_table
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.perf import PerfModel
from jaxserve.sched.journal import REHEARSAL, Replay, replay
from jaxserve.sched.metrics import Measured, measure, stage_allowance
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.sim.again import again, rows
from jaxserve.yamlio import seed_of

SUMMARY = "Replay a journal, check that every plan is equal, and simulate the same load."
EPILOG = """examples:
  jaxserve serve --mesh 4x2 --journal run.jsonl      # serve something, then
  jaxserve replay run.jsonl                          # equal plans? what does the simulator predict?
  jaxserve replay run.jsonl --save again.json
  # Why was a request late? A timeline for ui.perfetto.dev, and the events of the first late one
  jaxserve replay run.jsonl --no-simulate --timeline steps.json.gz --explain missed
"""
SHOWN = 5  # differences printed
POOR = 0.5  # mean error of the fitted step times above which the simulation says little


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = SUMMARY, EPILOG
    parser.add_argument("journal", type=Path, help="File that a server wrote with --journal.")
    parser.add_argument("--no-simulate", action="store_true", help="Only compare plans.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="Write the comparison as JSON.")
    parser.add_argument("--seed", type=seed_of, default=0, help="Seed of the simulation's noise.")
    parser.add_argument(
        "--policy",
        metavar="file:PATH:CLASS",
        help="Policy of a server whose policy came from a file: the file is code, so a journal alone does not run it.",
    )
    timeline.add_arguments(parser)


def perf_of(record: Mapping[str, Any]) -> PerfModel:
    """Build the step-time model that a journal's `instance` record describes."""
    return Recipe.of(record).make()


def main(args: argparse.Namespace) -> int:
    if not args.journal.is_file():
        raise InvalidValue(f"journal {str(args.journal)!r} does not exist; a server writes one with --journal FILE")
    recorder = timeline.recorder_of(args)
    try:
        with args.journal.open(encoding="utf-8") as lines:
            replayed = replay(lines, perf_of, recorder, args.policy)
    except UnicodeDecodeError as error:
        raise InvalidValue(f"journal {str(args.journal)!r} is no text: {error.reason}") from error
    print(f"{replayed.plans} plans replayed, {len(replayed.differences)} differ, {len(replayed.requests)} requests")
    for difference in replayed.differences[:SHOWN]:
        print(f"  line {difference.line}, {difference.instance}:")
        print(f"    recorded {difference.recorded}\n    replayed {difference.replayed}")
    saved: dict[str, Any] = {"plans": replayed.plans, "differences": len(replayed.differences)}
    if not args.no_simulate:
        saved["again"] = show(replayed, args.seed)
    if recorder is not None:
        timeline.tell(args, recorder, measured(replayed))
    if args.save is not None:
        args.save.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    timeline.show(args, recorder, f"journal {args.journal.name}, served", measured(replayed))
    return 1 if replayed.differences else 0


def measured(replayed: Replay) -> list[Measured]:
    """Measure the requests that clients sent."""
    asked = [request for request in replayed.requests.values() if request.key != REHEARSAL]
    return [measure(request, request.class_, stage_allowance(request)) for request in asked]


def show(replayed: Replay, seed: int) -> dict[str, Any]:
    """Print served beside simulated values and the step-time fit; return the same as a mapping."""
    outcome = again(replayed, seed)
    table = rows(outcome)
    print_table(
        "served, and simulated again with the measured step times",
        ["", "served", "simulated", "simulated/served"],
        [(name, f"{a:.4g}", f"{b:.4g}", f"{b / a:.2f}" if a else "") for name, a, b in table],
    )
    fit = outcome.fit
    print(
        f"step times: fitted to {fit.steps} steps, off by {fit.mape:.0%} on average "
        f"({', '.join(f'{kind} {error:.0%}' for kind, error in fit.by_kind.items())}); noise {outcome.noise:.2f}\n"
        f"share of the time computing: served {_shares(outcome.busy)}, simulated {_shares(outcome.simulated.busy)}"
    )
    if fit.mape > POOR:
        print("these step times do not fit one model: the simulated column says little (few steps, or a busy machine)")
    return {
        "rows": {name: {"served": a, "simulated": b} for name, a, b in table},
        "fit": {"mape": fit.mape, "by_kind": dict(fit.by_kind), "steps": fit.steps, "noise": outcome.noise},
        "busy": {"served": outcome.busy, "simulated": outcome.simulated.busy},
    }


def _shares(busy: tuple[float, ...]) -> str:
    return " ".join(f"{share:.0%}" for share in busy)
