"""The scripts in benchmarks/ start, and the one that needs no server runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = ["azure_replay", "host_gap", "scheduler_cost", "startup", "throughput", "unified", "vs_sglang_jax"]


def run(repo: Path, script: str, *flags: str) -> str:
    command = [sys.executable, "-W", "error", f"benchmarks/{script}.py", *flags]
    done = subprocess.run(command, cwd=repo, env={**os.environ}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_script_is_tested(repo: Path) -> None:
    assert sorted(path.stem for path in (repo / "benchmarks").glob("*.py")) == sorted([*SCRIPTS, "common"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(repo: Path, script: str) -> None:
    assert "--output" in run(repo, script, "--help")


def test_scheduler_cost(repo: Path, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    flags = "--policies distserve --sizes 8+16 --steps 20 --fleet 4x8 --programme 4+8 --output"
    assert "distserve" in run(repo, "scheduler_cost", *flags.split(), str(path), "--note", "a test")
    found = json.loads(path.read_text())
    assert {"commit", "device", "jax", "date", "note", "load_average"} <= set(found)
    (row,) = found["rows"]
    assert 0 < row["median_decide_ms"] <= row["median_plan_ms"] <= row["p99_plan_ms"]
    assert row["decoding_in_last_view"] > 0
    assert {"deflect", "unified"} <= {row["placement"] for row in found["placements"]}
    assert found["programme"][0]["admitted"] > 0
