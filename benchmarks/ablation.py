"""What each mechanism and each number of `unified` is worth: attainment without it, or with it halved and doubled.

Runs the cells of `cells.py` once as it is and once per variant, on all cores, and stores each run as it ends, so that a
run that was cut off continues. Prints, of each variant, the largest gain and loss in points: paired means over seeds.

    python benchmarks/ablation.py --traces ../traces                      # mechanisms
    python benchmarks/ablation.py --traces ../traces --numbers            # numbers
    python benchmarks/ablation.py --count                                 # the numbers, and where they stand
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

import common
import numpy as np

POLICY, ROUTER = "policies.unified", "routing.unified"
BALANCER = "routing.role_balancer"
NONE = np.arange(0)
PLAIN = (0, 1, -1, 2)  # literals that are no choice


class Without(NamedTuple):
    """A module, what is replaced in it, and by what."""

    module: str
    name: str  # with a dot: of a class
    instead: Any


def nothing(value: Any) -> Callable[..., Any]:
    return lambda *given, **named: value


OPTIONS = {
    "long steps of rows ahead": "unified:stretch=0.95",
    "ageing": "unified:ageing=0",
    "cushion": "unified:cushion=0",
}
MECHANISMS: dict[str, list[Without]] = {
    "moves of waiting prompts": [Without(ROUTER, "Unified.redirect", nothing([]))],
    "time kept for prompts to come": [Without(ROUTER, "Unified._soon", lambda self, start, work, due: due.copy())],
    "role changes": [Without(BALANCER, "RoleBalancer.roles", nothing({}))],
    "decoding in place": [Without(ROUTER, "Unified.decode_in_place", nothing(False))],
    "sharing steps": [Without(POLICY, "Unified._together", nothing(1))],
    "riders": [Without(POLICY, "Unified._riders", nothing(NONE))],
    "stops": [Without(POLICY, "Unified._stops", nothing(False))],
    "steps of rows that joined late": [Without(POLICY, "late_joiners", nothing(NONE))],
    "short steps after late joins": [Without(POLICY, "joiners_bound", nothing(inf))],
    "short steps for new prompts": [Without(POLICY, "spare_time", nothing(inf))],
    "longer steps under pressure": [Without(POLICY, "PRESSED", 0.0)],
    "decodes that skip prompts' steps": [
        Without(POLICY, "_finite_tpot", lambda view: np.full(len(view.decode), inf)),
    ],
    "hope": [Without(POLICY, "Unified._hope", nothing(True))],
    "shedding": [
        Without(POLICY, "Unified._shed", lambda self, view: importlib.import_module(
            f"jaxserve.sched.{POLICY}").one_each(view.decode)),
    ],
    "drift": [Without(POLICY, "Scaled", lambda perf, drift: perf)],
}  # fmt: skip
FILES = ("policies/unified.py", "routing/unified.py", "routing/role_balancer.py", "feasibility.py")
USERS = (*FILES, "cluster/first_tokens.py")  # which predicts the steps of `unified`


class Number(NamedTuple):
    """A literal of the source."""

    file: str
    line: int
    column: int
    value: float
    where: str  # the constant or function that it stands in


def users(name: str) -> set[str]:
    """Return the files of sched/ that import a name of feasibility.py."""
    root = common.ROOT / "sched"
    return {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("feasibility")
        if name in [alias.name for alias in node.names]
    }


def numbers() -> list[Number]:
    """Return the literals of the policy, its router, the balancer, and what only these call in feasibility.py."""
    found = []
    for file in FILES:
        tree = ast.parse((common.ROOT / "sched" / file).read_text())
        own = only(tree) if file == "feasibility.py" else None
        for node in tree.body:
            names = defined(node)
            if own is not None and not names & own:
                continue
            for at in ast.walk(node):
                if isinstance(at, ast.Constant) and isinstance(at.value, int | float) and at.value not in PLAIN:
                    found.append(Number(file, at.lineno, at.col_offset, at.value, ", ".join(sorted(names))))
    return found


def defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def only(tree: ast.Module) -> set[str]:
    """Return what of feasibility.py serves `unified` alone: each user is one of USERS, or serves it alone itself."""
    inside: dict[str, set[str]] = {}  # name -> names of the file that use it
    every = set().union(*map(defined, tree.body))
    for node in tree.body:
        for at in ast.walk(node):
            if isinstance(at, ast.Name) and at.id in every and not defined(node) & {at.id}:
                inside.setdefault(at.id, set()).update(defined(node))
    own = {name for name in every if users(name) <= {*USERS}}
    while more := {name for name in own if not inside.get(name, set()) <= own}:
        own -= more
    return {name for name in own if users(name) or inside.get(name)}


@contextmanager
def without(mechanism: str) -> Iterator[None]:
    """Replace what a mechanism consists of."""
    with ExitStack() as stack:
        for module, name, instead in MECHANISMS.get(mechanism, []):
            owner: Any = importlib.import_module(f"jaxserve.sched.{module}")
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            stack.enter_context(patch.object(owner, last, instead))
        yield


def changed(number: Number, doubled: bool) -> float:
    """Return a number halved or doubled. From 0.5 to 1 it is a share of a whole: its distance to 1 is halved then."""
    if not doubled:
        return max(1, number.value // 2) if isinstance(number.value, int) else number.value / 2
    return (1 + number.value) / 2 if 0.5 <= number.value < 1 else number.value * 2


def rewrite(number: Number, value: float) -> None:
    """Replace a literal in modules that this process imports from now on."""
    get_code = SourceFileLoader.get_code

    def rewritten(self: SourceFileLoader, fullname: str) -> Any:
        if not self.path.endswith(f"sched/{number.file}"):
            return get_code(self, fullname)
        tree = ast.parse(Path(self.path).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and (node.lineno, node.col_offset) == (number.line, number.column):
                node.value = value
        return compile(tree, self.path, "exec")

    SourceFileLoader.get_code = rewritten  # type: ignore[method-assign, assignment]


def runs(variant: str, name: str, rate: float, seeds: range, traces: Path | None, number: Any) -> dict[str, float]:
    """Simulate a cell with a variant, in a process that has not imported the scheduler. number: (number, value)."""
    if number is not None:
        rewrite(*number)
    import cells

    args = argparse.Namespace(policy=OPTIONS.get(variant, "unified"), routing="auto", traces=traces)
    with without(variant):
        return {
            f"{name}@{rate:g} seed {seed}": round(cells.attained(cells.CELLS[name], rate, seed, args), 4)
            for seed in seeds
        }


def rows(found: dict[str, dict[str, float]], variants: list[str]) -> list[list[str]]:
    """Return the largest gain and loss of each variant: means over seeds, in points, and their cells."""
    base, made = found[""], []
    for variant in variants:
        points: dict[str, list[float]] = {}
        for key, value in found.get(variant, {}).items():
            points.setdefault(key.partition(" seed ")[0], []).append(100 * (value - base[key]))
        means = sorted((mean(values), cell) for cell, values in points.items())
        if means:
            (loss, worst), (gain, best) = means[0], means[-1]
            made.append([variant, f"{loss:+.1f}", worst, f"{gain:+.1f}", best, f"{mean(at for at, _ in means):+.2f}"])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="without it, cells of traces are left out")
    parser.add_argument("--numbers", action="store_true", help="numbers instead of mechanisms")
    parser.add_argument("--count", action="store_true", help="only list the numbers")
    parser.add_argument("--only", default="", metavar="TEXT", help="variants whose name contains this")
    parser.add_argument(
        "--cells", default="", metavar="TEXT", help="cells, NAME@RATE, that contain one of these, with commas"
    )
    parser.add_argument("--seeds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes [cores]")
    common.add_output(parser, "ablation")
    args = parser.parse_args()
    every = numbers()
    if args.count:
        for one in every:
            print(f"{one.file}:{one.line}: {one.where}: {one.value:g}")
        print(f"{len(every)} numbers")
        return
    if args.numbers:
        common.name_output(parser, args, "ablation-numbers")
    variants: dict[str, Any] = {"": None}
    if args.numbers:
        variants |= {
            f"{one.where} = {one.value:g} (line {one.line}:{one.column}): {value:g}": (one, value)
            for one in every
            for value in (changed(one, False), changed(one, True))
        }
    else:
        variants |= dict.fromkeys([*MECHANISMS, *OPTIONS])
    variants = {name: number for name, number in variants.items() if not name or args.only in name}
    found: dict[str, dict[str, float]] = json.loads(args.output.read_text())["runs"] if args.output.is_file() else {}
    import cells

    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {
            pool.submit(runs, variant, name, rate, cells.seeds(name, args), args.traces, number): variant
            for variant, number in variants.items()
            for name, cell in cells.CELLS.items()
            if args.traces is not None or name not in cells.TRACES
            for rate in cell.rates
            if any(text in f"{name}@{rate:g}" for text in args.cells.split(","))
            and f"{name}@{rate:g} seed {cells.seeds(name, args)[-1]}" not in found.get(variant, {})
        }
        for count, done in enumerate(as_completed(waiting), 1):
            found.setdefault(waiting[done], {}).update(done.result())
            common.save(args, {"runs": found}, quiet=True)
            print(f"{count}/{len(waiting)}: {waiting[done] or 'as it is'}: {done.result()}", flush=True)
    from jaxserve.report.table import print_table

    heads = ["without", "loses most", "in", "gains most", "in", "mean"]
    print_table("Points of attainment", heads, rows(found, [name for name in variants if name]))


if __name__ == "__main__":
    main()
