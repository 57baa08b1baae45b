"""The tests of tests/gpu, which need a GPU, cover every op and are those that `benchmarks.gpu_day` runs."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_day.cases import FAMILIES
from benchmarks.gpu_day.parts import parts
from tests.support.kernels.interpreted import needs_interpreter
from tests.support.parity.wide import FAMILIES as FAMILIES_OF_MODELS

NUMERICS = "tests/gpu/test_numerics.py"
CASES = importlib.import_module("tests.gpu.test_numerics").FAMILIES
CHECKS, OPS = "tests.support.kernels.checks", "pallas_kernels.ops"


def run(repo: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider", *arguments]
    given = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(command, cwd=repo, env=given, capture_output=True, text=True, check=False)


def test_the_day_runs_every_family() -> None:
    assert tuple(CASES) == FAMILIES
    assert {part.arguments["model"] for part in parts(False) if part.call == "cases:law"} <= set(FAMILIES_OF_MODELS)


def imported(path: Path) -> Iterator[str]:
    """Yield the full names that a module imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_op_is_compared_with_float64_on_a_device(repo: Path) -> None:
    checks = [name.removeprefix(f"{CHECKS}.") for name in imported(repo / NUMERICS) if name.startswith(CHECKS)]
    files = [repo / CHECKS.replace(".", "/") / f"{name}.py" for name in checks]
    used = {name.split(".")[2] for file in files for name in imported(file) if name.startswith(OPS)}
    assert used == {path.parent.name for path in (repo / OPS.replace(".", "/")).glob("*/__init__.py")}


@pytest.mark.full
@needs_interpreter
def test_the_first_of_every_family_passes_in_the_interpreter(repo: Path) -> None:
    first = [
        f"{NUMERICS}::test_a_kernel_equals_float64[{family}-{next(iter(known))}]" for family, known in CASES.items()
    ]
    done = run(repo, *first, JAXSERVE_GPU_TESTS="interpret")
    assert f"{len(FAMILIES)} passed" in done.stdout, done.stdout
