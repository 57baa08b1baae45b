"""Plant known bugs, one at a time, in a copy of the tree, and check that the tests catch them.

A bug replaces text that must occur exactly once in its file (scripts/mutants.yaml). Its tests must pass without the bug
and fail with it. Exits with 1 if a bug survives or its text does not occur exactly once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import yaml

TABLE = Path(__file__).with_suffix(".yaml")
SKIPPED = {".git", "__pycache__", "build", "dist", ".venv", "shared", "results"}
FAILED = 1  # pytest's status for failed tests; any other status but 0 says nothing about the bug
TIMEOUT = 240  # seconds for the tests of one bug, which may make them hang


@dataclass(frozen=True)
class Mutant:
    """A bug: in `file`, `old` becomes `new`. `tests` are arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str | None:
        """Return the reason why the bug cannot be planted, or None."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        found = path.read_text(encoding="utf-8").count(self.old)
        return None if found == 1 else f"its text occurs {found} times in {self.file}, and must occur once"


@dataclass(frozen=True)
class Outcome:
    """The result of one bug. `verdict`: caught, SURVIVED or BROKEN (tests could not run)."""

    verdict: str
    by: str  # the first test that failed, or the last line of output
    seconds: float


def load(table: Path) -> list[Mutant]:
    """Read the table. Raises ValueError for missing or unknown keys, equal `old` and `new`, or duplicate names."""
    made = []
    for entry in yaml.safe_load(table.read_text(encoding="utf-8")):
        missing = {"name", "file", "old", "new", "tests"} ^ set(entry)
        if missing or entry["old"] == entry["new"]:
            raise ValueError(f"{entry.get('name')!r}: missing or unknown {sorted(missing)}, or old equals new")
        made.append(Mutant(entry["name"], entry["file"], entry["old"], entry["new"], tuple(entry["tests"].split())))
    names = [one.name for one in made]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"given twice: {sorted(twice)}")
    return made


def copy_tree(root: Path, target: Path) -> None:
    """Copy the files that tests need. Symlinks are kept, so that jaxserve/sched is the copied sched/."""
    shutil.copytree(root, target, symlinks=True, ignore=lambda _, names: [n for n in names if n in SKIPPED])


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run pytest in a copy, and return its status and the first failed test, or the last line of output."""
    # No bytecode: a file that changes within a second and keeps its size would run with stale bytecode.
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "first",
        "PYTEST_XDIST_AUTO_NUM_WORKERS": "0",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {TIMEOUT} s"
    first = re.search(r"^(?:FAILED|ERROR) (.+?)(?= - |$)", done.stdout, re.MULTILINE)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    return done.returncode, first[1] if first else lines[-1]


@contextmanager
def planted(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Plant the bug in the copy during the block."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def try_one(tree: Path, mutant: Mutant) -> Outcome:
    """Plant a bug, and run its tests."""
    begun = time.monotonic()
    with planted(tree, mutant):
        status, by = run_tests(tree, mutant.tests)
    verdict = {0: "SURVIVED", FAILED: "caught"}.get(status, "BROKEN")
    return Outcome(verdict, by, time.monotonic() - begun)


def try_all(root: Path, mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Try each bug, `jobs` at a time, in separate copies. Raises SystemExit if tests fail without any bug."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copy_tree(root, Path(folder) / str(number))
            trees.put(Path(folder) / str(number))

        def borrowed(mutant: Mutant | None, tests: Sequence[str]) -> Outcome:
            tree = trees.get()
            try:
                if mutant is not None:
                    return try_one(tree, mutant)
                status, by = run_tests(tree, tests)
                return Outcome("" if status == 0 else "BROKEN", by, 0.0)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            selections = dict.fromkeys(mutant.tests for mutant in mutants)
            sound = pool.map(lambda tests: (tests, borrowed(None, tests)), selections)
            wrong = [f"{' '.join(tests)}: {outcome.by}" for tests, outcome in sound if outcome.verdict]
            if wrong:
                sys.exit("these tests fail without any bug:\n" + "\n".join(wrong))
            outcomes = []
            for mutant, outcome in zip(mutants, pool.map(lambda one: borrowed(one, ()), mutants), strict=True):
                show(mutant, outcome)
                outcomes.append(outcome)
    return outcomes


def show(mutant: Mutant, outcome: Outcome) -> None:
    """Print one line of the table."""
    print(
        f"{outcome.verdict:<8} {outcome.seconds:5.1f} s  {mutant.name:<62} {mutant.file:<32} {outcome.by}", flush=True
    )


def main(argv: Sequence[str] | None = None, root: Path = TABLE.parent.parent, table: Path = TABLE) -> int:
    """Run scripts/mutants."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only bugs whose name or file contains a word")
    parser.add_argument("--check", action="store_true", help="only check that each bug can be planted")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N", help="bugs tried concurrently [2]"
    )
    args = parser.parse_args(argv)
    mutants = [
        one for one in load(table) if not args.words or any(word in f"{one.name} {one.file}" for word in args.words)
    ]
    problems = [f"{one.name}: {problem}" for one in mutants if (problem := one.problem(root)) is not None]
    if problems or not mutants:
        print("\n".join(problems) or f"no bug has one of {args.words} in its name or file", file=sys.stderr)
        return 1
    if args.check:
        print(f"{len(mutants)} bugs can be planted")
        return 0
    begun = time.monotonic()
    outcomes = try_all(root, mutants, max(1, args.jobs))
    counts = {verdict: sum(one.verdict == verdict for one in outcomes) for verdict in ("caught", "SURVIVED", "BROKEN")}
    said = ", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items())
    print(f"{len(outcomes)} bugs: {said}, in {time.monotonic() - begun:.0f} s")
    return 0 if counts["caught"] == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
