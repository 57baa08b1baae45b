"""The programs of tests/gpu compile without a card, and what is wrong with one is said."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pallas_kernels import ptxas
from pallas_kernels.gate.targets import TARGETS
from tests.support.kernels.deviceless import chosen


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    return importlib.import_module("tests.gpu.test_numerics")


def test_every_case_of_every_family_is_compiled(cases: ModuleType) -> None:
    found = chosen(cases, [])
    assert [family for family, _ in found] == [family for family, known in cases.FAMILIES.items() for _ in known]
    assert len(found) == len(set(found)) == 208
    assert chosen(cases, ["kv_pages: *float16"]) == [one for one in found if "kv_pages" in one and "float16" in one[1]]


def calls(check: Any) -> Callable[..., Any]:
    """Return a check, or what a partial calls, with its arguments bound to the signature."""
    if isinstance(check, functools.partial):
        inspect.signature(check.func).bind(*check.args, **check.keywords)
    return check  # type: ignore[no-any-return]


def test_every_case_calls_its_check_with_arguments_that_it_takes(cases: ModuleType) -> None:
    for family, case in chosen(cases, []):
        check = calls(cases.FAMILIES[family][case])
        for cell in getattr(check, "__closure__", None) or ():
            calls(cell.cell_contents)
    with pytest.raises(TypeError):
        calls(functools.partial(calls, size=3))


@pytest.mark.skipif(TARGETS["h200"].missing() is not None, reason=str(TARGETS["h200"].missing()))
@pytest.mark.slow
def test_a_case_is_compiled_for_both_cards_and_not_again(repo: Path, tmp_path: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "tests.support.kernels.deviceless",
            "--state",
            str(tmp_path),
            "decode: one row",
        ]
        return subprocess.run(command, cwd=repo, env={**os.environ}, capture_output=True, text=True, timeout=250)

    first, again = run(), run()
    assert first.returncode == again.returncode == 0, first.stdout + first.stderr
    assert first.stderr.count("decode: one row") == 2 and again.stderr.count("decode: one row") == 0
    assert ptxas.release(ptxas.found()) in again.stdout
