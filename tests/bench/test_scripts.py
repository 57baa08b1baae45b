"""The scripts in benchmarks/ start, and those that need no server run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - {"common"})


def run(repo: Path, script: str, *flags: str, timeout: float = 120) -> str:
    command = [sys.executable, "-W", "error", f"benchmarks/{script}.py", *flags]
    done = subprocess.run(command, cwd=repo, env={**os.environ}, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(repo: Path, folder: Path, script: str, flags: str, timeout: float = 600) -> tuple[str, dict[str, Any]]:
    """Run a script; return what it says, and what it writes."""
    path = folder / "results.json"
    said = run(repo, script, *flags.split(), "--output", str(path), timeout=timeout)
    return said, json.loads(path.read_text())


HELPS = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, "benchmarks")
found = {}
for script in sys.argv[1:]:
    sys.argv, said = [f"benchmarks/{script}.py", "--help"], io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            found[script] = [end.code, said.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps(repo: Path) -> dict[str, tuple[int, str]]:
    """Return each script's --help output and exit status, all from one process."""
    command = [sys.executable, "-W", "error", "-c", HELPS, *SCRIPTS]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(helps: dict[str, tuple[int, str]], script: str) -> None:
    status, said = helps[script]
    assert status == 0 and "--output" in said


def test_overload(repo: Path, tmp_path: Path) -> None:
    """A long queue costs no throughput; the script compares times, which need a quiet machine."""
    flags = "--policies unified kairos --rows 8 --waiting 50 2000 --steps 30"
    _, found = results(repo, tmp_path, "overload", flags, timeout=120)
    assert found["least_share"] >= 0.95 and len(found["rows"]) == 4


@pytest.mark.full
def test_failover(repo: Path, tmp_path: Path) -> None:
    """Kill an engine twice; the script exits with 1, and run() fails, if a stream differs."""
    _, found = results(repo, tmp_path, "failover", "--kills 2 --streams 12 --tokens 100")
    assert [one["equal"] for one in found["rounds"]] == [12, 12] and sum(one["continued"] for one in found["rounds"])


@pytest.mark.full
@pytest.mark.timeout(700)
def test_hostile(repo: Path, tmp_path: Path) -> None:
    rows = results(repo, tmp_path, "hostile", "--rounds 1")[1]["rows"]
    assert len(rows) > 30  # the script exits with 1 if a stream ends or an answer is of the wrong kind


@pytest.mark.full
def test_a_short_storm_passes(repo: Path, tmp_path: Path) -> None:
    """Run the storm for 20 s; the script exits with 1, and run() fails, on any problem."""
    flags = "--minutes 0.34 --measure 5 --turn-every 1 --most-growth 1000"
    said, found = results(repo, tmp_path, "soak", flags)
    assert "all checks passed" in said
    assert found["requests"] > 5 and found["ends"] and found["wrong"] == []
    assert found["role_changes"] > 3 and found["after"]["moved"] > 0
