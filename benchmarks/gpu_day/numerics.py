"""Run the tests marked `gpu` on the device: a row per test, kept even if a later test ends the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import probe
from .part import Run, Skip

ROOT = Path(__file__).resolve().parents[2]
NUMERICS, LAW = "tests/gpu/test_numerics.py", "tests/gpu/test_law.py"
FAMILIES = (
    "decode",
    "prefill",
    "decode_8bit",
    "prefill_8bit",
    "shared_prefixes",
    "mla",
    "grouped_matmul",
    "quantized_matmul",
    "gated_matmul",
    "kv_write",
    "kv_pages",
    "sampling",
)
MODELS = ("llama", "qwen", "gemma", "gpt_oss", "opt", "minimax", "deepseek")


class Rows:
    """A pytest plugin that records each test as it ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.passed = self.failed = 0
        self.reasons: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.passed and report.when != "call":
            return
        words = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
        reason = (words.strip().splitlines() or [""])[-1][:300]
        self._run.row("tests", test=report.nodeid, outcome=report.outcome, seconds=report.duration, reason=reason)
        self.passed += report.passed
        self.failed += report.failed
        if report.skipped:
            self.reasons.append(reason)


def tests(run: Run, file: str, family: str = "") -> None:
    """Run the test of a family, or all of a file. Raises AssertionError if one fails."""
    import pytest

    rows = Rows(run)
    status = pytest.main([*_selected(file, family), "-x" if run.dry else "--maxfail=20"], plugins=[rows])
    if rows.failed or status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise AssertionError(f"{rows.failed} tests failed, {rows.passed} passed; pytest ends with {int(status)}")
    if not rows.passed:
        raise Skip("; ".join(dict.fromkeys(rows.reasons)) or f"no test of {family or file} is marked gpu")


def memcheck(run: Run, family: str) -> None:
    """Run the first test of a family under compute-sanitizer, which finds accesses beyond a buffer."""
    tool = probe.sanitizer()
    if tool is None:
        raise Skip("compute-sanitizer is not installed")
    listed = _said([sys.executable, "-m", "pytest", *_selected(NUMERICS, family), "--collect-only"], run)[1]
    if (first := first_of(listed)) is None:
        raise Skip(f"no test of {family} is marked gpu")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest"]
    status, said = _said([*command, *_selected(first, "")], run)
    summary = (re.findall(r"=+ (ERROR SUMMARY: .*|.*nsupported.*|.*[Uu]nable.*)", said) or ["no summary"])[-1]
    run.row("memcheck", test=first, status=status, summary=summary)
    if "ERROR SUMMARY" not in summary:
        raise Skip(f"compute-sanitizer does not work here: {summary}")
    assert status == 0, summary


def first_of(listed: str) -> str | None:
    """Return the first test that `pytest --collect-only -q` lists."""
    found = re.search(r"^\S+::.+$", listed, re.MULTILINE)
    return found and found[0]


def _selected(file: str, family: str) -> list[str]:
    """Return the arguments of pytest for the test of one family, whose parameters are its cases, or for a file."""
    if not (ROOT / file.partition("::")[0]).exists():
        raise Skip(f"{file} does not exist")
    chosen = f"{ROOT / file}::test_{family}" if family else f"{ROOT / file}"
    return ["-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(ROOT), chosen]


def _said(command: Sequence[str], run: Run) -> tuple[int, str]:
    """Run a command within the part's time, and return its status and output."""
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=run.left() - 5
    )
    print(done.stdout, done.stderr, sep="\n")
    return done.returncode, done.stdout + done.stderr
