"""Write a table of the outcome of each request under every fault of the fault matrix.

    python benchmarks/fault_matrix.py

Runs the tests of the matrix (`pytest -m full`), which record what they observe as JUnit properties, and writes one row
per test with the commit and machine of the run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import RESULTS, ROOT, origin

TESTS = ("tests/engine/test_fault_matrix.py", "tests/server/test_killed.py")
COLUMNS = ("fault", "at", "got")


def rows(report: Path) -> Iterator[tuple[str, ...]]:
    """Yield the recorded columns and the outcome of each test case of a JUnit report."""
    for case in ElementTree.parse(report).iter("testcase"):
        noted = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        outcome = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        name = case.get("name", "")
        yield (*(noted.get(column, "" if column != "fault" else name) for column in COLUMNS), outcome)


def table(found: list[tuple[str, ...]], about: dict[str, Any]) -> str:
    """Return the rows as aligned text, after a header that states their origin."""
    titles = ("fault", "where", "what each request got", "test")
    widths = [max(len(row[column]) for row in (titles, *found)) for column in range(len(titles))]
    lines = [f"pytest -m full {' '.join(TESTS)}", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    for row in (titles, tuple("-" * width for width in widths), *found):
        lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    default = RESULTS / f"faults-{time.strftime('%Y-%m-%d')}.txt"
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help="[%(default)s]")
    parser.add_argument("-k", metavar="EXPRESSION", help="only these tests, as pytest's -k")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "full",
            "-q",
            "-o",
            "junit_family=xunit1",
            f"--junitxml={report}",
            *TESTS,
        ]
        status = subprocess.run([*command, *(["-k", args.k] if args.k else [])], cwd=ROOT, check=False).returncode
        found = list(rows(report))
    args.output.write_text(table(found, origin()), encoding="utf-8")
    print(f"wrote {args.output}")
    return status


if __name__ == "__main__":
    sys.exit(main())
