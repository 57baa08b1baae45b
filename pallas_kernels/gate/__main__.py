"""python -m pallas_kernels.gate: compile every kernel, and whole engine steps, for a device that is not present.

Exits 1, naming the case, the figure and the bound, if a program does not compile, spills registers,
uses more of them than recorded, serializes wgmma, lacks an instruction it needs, does not update
its donated arguments in place, copies a weight or a pool, is cut into several CUDA graphs, or does
not fit the memory of a device. docs/reference/kernels.md says more.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pallas_kernels.gate import bounds, table
from pallas_kernels.gate.targets import TARGETS, Target, prepare

if TYPE_CHECKING:
    from pallas_kernels.gate.cases import Compilable
    from pallas_kernels.gate.figures import Figures


LIMIT = 600.0  # seconds per case


def parser() -> argparse.ArgumentParser:
    head, rest = (__doc__ or "").split("\n", 1)
    options = argparse.ArgumentParser(
        prog="python -m pallas_kernels.gate",
        description=head.split(": ", 1)[1] + rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--target", choices=sorted(TARGETS), default="h200", help="what to compile for (default: h200)"
    )
    options.add_argument(
        "--all", action="store_true", help="also compile the cases that CI leaves out: further models and configs"
    )
    options.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        default=[],
        help="only cases whose name contains the shell pattern PATTERN; may be repeated; implies --all",
    )
    options.add_argument(
        "--cases",
        metavar="MODULE",
        action="append",
        default=[],
        help="take the cases from MODULE.cases() instead of the usual modules; may be repeated",
    )
    options.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    options.add_argument(
        "--record",
        action="store_true",
        help="record the figures of cases that break no fixed rule as the bounds for this jax and compiler",
    )
    options.add_argument(
        "--bounds",
        metavar="FILE",
        type=Path,
        default=bounds.FILE,
        help="read and write the bounds in FILE instead of the package's",
    )
    options.add_argument("--json", metavar="FILE", type=Path, help="also write the figures and verdicts to FILE")
    options.add_argument(
        "--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="number of cases compiled at once"
    )
    options.add_argument(
        "--limit",
        metavar="S",
        type=float,
        default=LIMIT,
        help="time limit of a case in seconds (default: %(default).0f)",
    )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    target = TARGETS[args.target]
    if args.record and target.bounds != target.name:
        print(f"{target.name} is checked against the bounds of {target.bounds}: record those", file=sys.stderr)
        return 1
    if (reason := target.missing()) is not None and not args.list:
        print(f"the compile gate cannot run: {reason}", file=sys.stderr)
        return 1
    prepare(target)
    chosen = choose(target, args.cases, args.only, args.all)
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if not chosen:
        print(f"no case for {args.target} matches {' or '.join(args.only) or 'at all'}", file=sys.stderr)
        return 1
    gate = Gate(target, args.bounds, args.record, args.jobs, args.limit)
    return gate.run(chosen, args.json, whole=args.all and not args.only)


def choose(target: Target, modules: Sequence[str], patterns: Sequence[str], everything: bool) -> list[Compilable]:
    """Return the cases to compile, engine steps first, as they take longest."""
    from pallas_kernels.gate.cases import GPU, TPU, Case, collect, installed

    usual = installed(GPU if target.platform == "cuda" else TPU)
    cases = collect(modules or usual)
    jax = tuple(int(part) for part in version("jax").split(".")[:2])
    cases = [case for case in cases if jax >= case.least_jax and target.memory >= case.least_memory]
    cases = [case for case in cases if case.target in ("", target.name)]
    if patterns:
        cases = [case for case in cases if any(fnmatch.fnmatchcase(case.name, f"*{pattern}*") for pattern in patterns)]
    elif not everything:
        cases = [case for case in cases if case.usual]
    return sorted(cases, key=lambda case: isinstance(case, Case))


class Gate:
    """One run of the gate; `_hear` is the only writer of its results."""

    def __init__(self, target: Target, file: Path, record: bool, jobs: int, limit: float) -> None:
        self.target = target
        self.file = file
        self.recording = record
        self.jobs = jobs
        self.limit = limit  # seconds per case
        self.jax = version("jax")
        self.ptxas = target.ptxas()
        self.known, self.since = bounds.load(target.bounds, self.jax, file, ptxas=self.ptxas)
        self.outcomes: dict[str, Figures | str] = {}
        self.breaches: dict[str, list[str]] = {}
        self.total = 0

    def run(self, cases: Sequence[Compilable], report: Path | None, *, whole: bool) -> int:
        from pallas_kernels.gate.compiling import compile_all

        began, self.total = time.perf_counter(), len(cases)
        compile_all(cases, self.target, jobs=self.jobs, tell=self._hear, limit=self.limit)
        seconds = time.perf_counter() - began
        names = [case.name for case in cases]
        self._show(names, seconds)
        if self.recording:
            self._record(whole)
        if report is not None:
            report.write_text(json.dumps(self._report(names, seconds), indent=1) + "\n", encoding="utf-8")
        broken = [name for name in names if self.breaches[name]]
        for name in broken:
            for breach in self.breaches[name]:
                print(f"FAILED {name}: {breach}")
        print(f"{len(names) - len(broken)} of {len(names)} cases passed in {seconds:.0f} s")
        return 1 if broken else 0

    def _hear(self, case: Compilable, outcome: Figures | str) -> None:
        from pallas_kernels.gate.rules import excess, laws

        if isinstance(outcome, str):
            breaches = [outcome]
        else:
            breaches = list(laws(case, outcome, self.target.memory))
            if not self.recording:
                breaches += excess(outcome, self.known.get(case.name))
        self.outcomes[case.name], self.breaches[case.name] = outcome, breaches
        print(
            f"[{len(self.outcomes)}/{self.total}] {case.name}: {self._verdict(case.name)}", file=sys.stderr, flush=True
        )

    def _verdict(self, name: str) -> str:
        if self.breaches[name]:
            return "FAILED"
        return "recorded" if self.recording else "ok"

    def _show(self, names: Sequence[str], seconds: float) -> None:
        title = f"{self.target.name}, jax {self.jax}, {self.target.compiler()}"
        if self.since and self.since != bounds.key_of(self.jax, self.ptxas) and not self.recording:
            title += f"; no bounds are recorded for these versions, using those of jax {self.since}"
        bandwidth = self.target.bandwidth
        table.show([table.row(name, self.outcomes[name], self._verdict(name), bandwidth) for name in names], title)

    def _record(self, whole: bool) -> None:
        from pallas_kernels.gate.rules import bound_of

        recorded = {
            name: bound_of(outcome)
            for name, outcome in self.outcomes.items()
            if not isinstance(outcome, str) and not self.breaches[name]
        }
        bounds.record(self.target.bounds, self.jax, recorded, self.file, ptxas=self.ptxas, whole=whole)
        print(f"{len(recorded)} bounds of jax {bounds.key_of(self.jax, self.ptxas)} written to {self.file}")

    def _report(self, names: Sequence[str], seconds: float) -> dict[str, object]:
        cases: dict[str, object] = {}
        for name in names:
            outcome = self.outcomes[name]
            figures = {} if isinstance(outcome, str) else asdict(outcome)
            cases[name] = {"ok": not self.breaches[name], "breaches": self.breaches[name], **figures}
        head = {"target": self.target.name, "jax": self.jax, "compiler": self.target.compiler()}
        return {**head, "seconds": round(seconds, 1), "cases": cases}


if __name__ == "__main__":
    sys.exit(main())
