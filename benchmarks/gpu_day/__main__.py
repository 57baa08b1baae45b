"""Measure kernels and engine on a borrowed accelerator, in calls of a few minutes that resume.

    python -m benchmarks.gpu_day --stage A --state day --out out
    python -m benchmarks.gpu_day --report --state day --out out

Every part of a stage is a process with a time limit. Parts that are done are skipped by the next call with the same
state; a part that failed is tried once more. docs/guide/gpu-day.md explains the whole day.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import common
from jaxserve.report.progress import bar

from . import probe, report, wheels
from .child import run_part
from .part import Part
from .runner import HANGS, Stage, todo
from .stages import MODULES, STAGES, all_parts
from .state import State, finished


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--stage", choices=STAGES, help="run the parts of a stage")
    what.add_argument("--report", action="store_true", help="write tables and plots of the state into --out")
    what.add_argument("--list", action="store_true", help="list all parts, with their limits and outcomes")
    what.add_argument("--wheels", action="store_true", help="list the wheels to carry, with their sizes")
    what.add_argument("--fetch-wheels", type=Path, metavar="DIR", help="download these wheels into a folder")
    what.add_argument("--build-executable", action="store_true", help="compile the executable of stage A into --state")
    what.add_argument("--run-part", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, metavar="DIR", help="what earlier calls returned, and this one adds to")
    parser.add_argument("--out", type=Path, metavar="DIR", help="what to bring back: state, packed files, report")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no part that would end later [%(default)s]")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="run this part though it is done")
    parser.add_argument("--carried", type=Path, metavar="DIR", help="folder of wheels to put on the path first")
    parser.add_argument(
        "--jobs", type=int, default=max(2, (os.cpu_count() or 1) // 2), help="checks at a time [%(default)s]"
    )
    parser.add_argument("--note", default="", help="stored with the call: the commit, where git is missing")
    parser.add_argument("--dry", action="store_true", help="test the scripts on a CPU with tiny shapes")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--modules", default=",".join(MODULES), help=argparse.SUPPRESS)  # of stages, for tests
    args = parser.parse_args()
    if args.state is None and (args.stage or args.report or args.build_executable):
        parser.error("--state is required")
    if args.out is None and (args.stage or args.report):
        parser.error("--out is required")
    return args


def main() -> None:
    args = arguments()
    modules = args.modules.split(",")
    if args.wheels:
        print(wheels.table())
    elif args.fetch_wheels:
        wheels.fetch(args.fetch_wheels)
    elif args.run_part:
        part = next(part for part in all_parts(args.dry, modules) if part.name == args.run_part)
        run_part(part, State(args.state), dry=args.dry, deadline=args.deadline)
    elif args.build_executable:
        from .kernels import executable

        executable.build(State(args.state).files)
    elif args.list:
        show_parts(all_parts(args.dry, modules), State(args.state) if args.state else None)
    elif args.report:
        report.write(State(args.state), all_parts(args.dry, modules), args.out)
    else:
        run_stage(args, modules)


def show_parts(parts: list[Part], state: State | None) -> None:
    attempts = state.attempts() if state else {}
    for part in parts:
        runs = [run.outcome for run in attempts.get(part.name, [])]
        print(f"{part.stage}  {part.seconds:4.0f} s  {part.name}{'  ' if runs else ''}{', '.join(runs)}")


def run_stage(args: argparse.Namespace, modules: list[str]) -> None:
    """Run the parts of a stage that are left, and leave in --out what must come back."""
    until = time.monotonic() + 60 * args.minutes
    state = State(args.state)
    if other := [call for call in state.calls() if call["dry"] != args.dry]:
        raise SystemExit(f"{args.state} holds a {'dry ' * other[0]['dry']}run: use another state folder")
    site = wheels.unpack(args.carried, state.scratch / "site") if args.carried else None
    machine = probe.machine()
    lacks = probe.missing(machine)
    probe.show(machine, lacks)
    if not machine["nvidia_smi"] and not args.dry:
        raise SystemExit("no NVIDIA driver here; --dry tests the scripts without one")
    every = all_parts(args.dry, modules)
    if unknown := set(args.again) - {part.name for part in every}:
        raise SystemExit(f"no part is named {', '.join(sorted(unknown))}; --list shows them")
    mine = [part for part in every if part.stage == args.stage]
    if not mine:
        raise SystemExit(f"stage {args.stage} has no parts")
    state.append({"call": call_of(args, machine, lacks)})
    stage = Stage(state, list(todo(mine, state, args.again)), args.dry, until, modules, args.out, site, args.jobs)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped(stage))
    try:
        with bar(f"stage {args.stage}") as show:
            stage.run(show)
    finally:
        stage.stop()
        report.tables(state, every, args.out)
        left_out = state.export(args.out)
        summarize(stage, mine, left_out)


def stopped(stage: Stage) -> NoReturn:
    """End the parts that run, so that the call can end."""
    stage.stop()
    sys.exit("stopped by a signal")


def call_of(args: argparse.Namespace, machine: dict[str, Any], lacks: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what the report must know about a call."""
    asked = {"stage": args.stage, "dry": args.dry, "minutes": args.minutes, "note": args.note}
    return {**asked, **common.origin(), **machine, "missing": lacks}


def summarize(stage: Stage, parts: list[Part], left_out: list[str]) -> None:
    attempts = stage.state.attempts()
    over = sum(finished(attempts.get(part.name, [])) for part in parts)
    print(f"{over} of {len(parts)} parts need no other call; {stage.out} is the state of the next one")
    if stage.hangs >= HANGS:
        print(f"ended after {stage.hangs} parts that hung: the device itself may be at fault; get another one")
    if later := stage.not_started():
        print(f"{len(later)} parts were not started: {', '.join(later)}")
    if left_out:
        print(f"too large to come back: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
