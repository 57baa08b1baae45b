"""Print the test coverage of jaxserve/sched and of the rest of jaxserve.

    pip install '.[dev]' && pytest --cov --cov-report=json:FILE && python .ci/coverage.py FILE

This measures the installed package, in which jaxserve/sched holds the files of sched/. Servers that
tests start as subprocesses are not measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def shares(report: dict[str, dict[str, dict[str, int]]]) -> dict[str, float]:
    """Return the share of covered statements of each part of a `coverage json` report."""
    found: dict[str, list[int]] = {"sched": [0, 0], "jaxserve": [0, 0]}
    for name, file in report["files"].items():
        counts = found["sched" if "jaxserve/sched/" in Path(name).as_posix() else "jaxserve"]
        counts[0] += file["summary"]["covered_lines"]
        counts[1] += file["summary"]["num_statements"]
    return {part: covered / max(1, statements) for part, (covered, statements) in found.items()}


if __name__ == "__main__":
    for part, share in shares(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).items():
        print(f"{part}: {share:.1%} of statements run in the bare tests")
