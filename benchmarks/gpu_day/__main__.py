"""Measure kernels and engine on a borrowed accelerator, in one command that resumes.

    python -m benchmarks.gpu_day --pack carried                 # at home: what to carry, and its size
    python -m benchmarks.gpu_day --state day --out out --carried carried --minutes 9
    python -m benchmarks.gpu_day --report --state day --out out

Every part is a process with a time limit. The next call with the same state skips what is done, and tries once more
what failed. Cards are never mixed: each has a folder of its own in the state. docs/guide/gpu-day.md explains the day.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import common
from jaxserve.report.progress import bar

from . import carry, probe, report
from .child import run_part
from .part import Part, slug
from .runner import Call, todo
from .state import State, finished

DRY = "dry"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--report", action="store_true", help="write tables and plots of the state into --out")
    what.add_argument("--list", action="store_true", help="list all parts, with their limits and outcomes")
    what.add_argument("--pack", type=Path, metavar="DIR", help="make the folder to carry, and say its size")
    what.add_argument("--run-part", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, metavar="DIR", help="what earlier calls returned, and this one adds to")
    parser.add_argument("--out", type=Path, metavar="DIR", help="what to bring back: state, packed files, report")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no part that would end later [%(default)s]")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="run this part though it is done")
    parser.add_argument("--carried", type=Path, metavar="DIR", help="the folder that --pack made")
    parser.add_argument("--note", default="", help="stored with the call: the commit, where git is missing")
    parser.add_argument("--dry", action="store_true", help="test the scripts on a CPU with tiny shapes")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # names of parts, with commas
    parser.add_argument("--most", type=float, default=float("inf"), help=argparse.SUPPRESS)  # seconds of a part
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--module", default=f"{__package__}.parts", help=argparse.SUPPRESS)  # other parts, for tests
    args = parser.parse_args()
    if args.state is None and not (args.list or args.pack):
        parser.error("--state is required")
    if args.out is None and not (args.list or args.pack or args.run_part):
        parser.error("--out is required")
    return args


def main() -> None:
    args = arguments()
    if args.pack:
        try:
            print(carry.pack(args.pack))
        except carry.TooLarge as error:
            raise SystemExit(str(error)) from None
        return
    every: list[Part] = importlib.import_module(args.module).parts(args.dry)
    every = [part for part in every if args.only is None or part.name in args.only.split(",")]
    if args.run_part:
        part = next(part for part in every if part.name == args.run_part)
        run_part(part, State(args.state), dry=args.dry, deadline=args.deadline)
    elif args.list:
        for card in cards(args.state) or [None]:
            show_parts(every, card)
    elif args.report:
        for card in cards(args.state):
            report.write(State(card), every, args.out / card.name)
    else:
        run_call(args, every)


def cards(state: Path | None) -> list[Path]:
    """Return the folders of a state, one for each card."""
    return sorted(path.parent for path in state.glob("*/state.jsonl")) if state else []


def show_parts(parts: list[Part], card: Path | None) -> None:
    attempts = State(card).attempts() if card else {}
    print(card.name if card else "no state")
    for part in parts:
        runs = [run.outcome for run in attempts.get(part.name, [])]
        beside = "beside" if part.beside else "      "
        print(f"{part.seconds:4.0f} s  {beside}  {part.name}{'  ' if runs else ''}{', '.join(runs)}")


def run_call(args: argparse.Namespace, every: list[Part]) -> None:
    """Run the parts that are left, and leave in --out what must come back."""
    until = time.monotonic() + 60 * args.minutes
    site = carry.unpack(args.carried, args.state / "site") if args.carried else None
    machine = probe.machine()
    lacks = probe.missing(machine)
    probe.show(machine, lacks)
    if not machine["nvidia_smi"] and not args.dry:
        raise SystemExit("no NVIDIA driver here; --dry tests the scripts without one")
    if unknown := set(args.again) - {part.name for part in every}:
        raise SystemExit(f"no part is named {', '.join(sorted(unknown))}; --list shows them")
    card = DRY if args.dry else slug(machine["nvidia_smi"].partition(",")[0])
    for other in cards(args.state):
        if other.name != card:
            print(f"left alone: the state of {other.name}; this is {card}", flush=True)
    state, out = State(args.state / card), args.out / card
    if state.cut:
        print(f"the last line of {state.path} was cut off and is ignored", flush=True)
    carried = args.carried.glob("*.executable") if args.carried else ()
    for path in carried:
        shutil.copy(path, state.files)
    shutil.rmtree(state.scratch / "claims", ignore_errors=True)
    state.append({"call": call_of(args, machine, lacks)})
    call = Call(state, list(todo(every, state, args.again)), args.dry, until, args.module, out, site, args.most)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped(call))
    try:
        with bar("gpu day") as show:
            call.run(show)
    finally:
        call.stop()
        report.tables(state, every, out)
        summarize(call, every, state.export(out))


def stopped(call: Call) -> NoReturn:
    """End the parts that run, so that the call can end."""
    call.stop()
    sys.exit("stopped by a signal")


def call_of(args: argparse.Namespace, machine: dict[str, Any], lacks: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what the report must know about a call."""
    return {
        "dry": args.dry, "minutes": args.minutes, "note": args.note, **common.origin(), **machine, "missing": lacks
    }  # fmt: skip


def summarize(call: Call, parts: list[Part], left_out: list[str]) -> None:
    attempts = call.state.attempts()
    over = sum(finished(attempts.get(part.name, [])) for part in parts)
    print(f"{over} of {len(parts)} parts need no other call; {call.out} is the state of the next one")
    if later := call.not_started():
        print(f"{len(later)} parts were not started: {', '.join(later)}")
    if left_out:
        print(f"too large to come back: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
