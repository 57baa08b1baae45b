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
from tests.support.kernels import deviceless
from tests.support.kernels.deviceless import Assembled, Lowered, Program, Run, State, chosen, digest
from tests.support.kernels.machine import listing

PTX = "//\n.version 9.5\n.target sm_90a\n\t.loc\t1 25 0\n\tadd.s32 \t%r1, %r2, %r3;\n"
SOUND = Assembled(168, 0, (), (), (), 1.5)
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 'release 13.0, V13.0.88' && exit
grep '^.version 9.0' "$1" >&2 || exit 1
echo 'Used 40 registers, 8 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads' >&2
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "ptxas"
    program.parent.mkdir()
    program.write_text(COMPILER)
    program.chmod(0o755)
    return program


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


def test_a_digest_is_that_of_the_program() -> None:
    assert digest(PTX) == digest(PTX.replace("9.5", "9.0").replace(".loc\t1 25", ".loc\t1 26"))
    assert digest(PTX) != digest(PTX.replace("%r3", "%r4"))


def test_a_kernel_is_assembled_in_the_language_of_its_ptxas(compiler: Path) -> None:
    disassembler = compiler.with_name("nvdisasm")
    code = listing("HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56, gsb0", "MOV R24, R1")
    disassembler.write_text(f"#!/bin/sh\ncat <<'END'\n{code}END\n")
    disassembler.chmod(0o755)
    made = deviceless.assemble(PTX, compiler, disassembler)
    assert (made.registers, made.spills, made.serialized, len(made.hazards)) == (40, 14, (), 1)
    assert made.spilling == ("14 bytes of registers spilled, the bound is 0",), "it has no loop with products"
    with pytest.raises(RuntimeError):
        deviceless.assemble(PTX.replace(".version", ".other"), compiler, disassembler)


def ran(state: Path, compiler: Path, kernel: Assembled, other: str = PTX, **outcome: Any) -> Run:
    """Return a run of one case, lowered and assembled as given; `other` is its PTX for the second target."""
    kept = State(state)
    for target, ptx in (("h200", PTX), ("h100", other)):
        kept.lowered(Program("mla", "one", target, compiler), outcome.get("failed") or Lowered((ptx,), **outcome))
    kept.assembled(f"{digest(PTX)} 13.0.88", kernel)
    return Run(State(state) if "failed" not in outcome else kept, [("mla", "one")], [compiler], 1)


@pytest.mark.parametrize(
    ("kernel", "options", "said"),
    [
        (SOUND, {}, ""),
        (SOUND, {"skipped": "why"}, ""),
        (SOUND, {"failed": "does not compile: TypeError"}, "FAILED mla: one: does not compile: TypeError"),
        (SOUND, {"other": PTX + "ret;"}, "FAILED mla: one: its PTX is not the same for h200 and h100"),
        (SOUND._replace(spilling=("8 bytes spilled",)), {}, "8 bytes spilled"),
        (SOUND._replace(serialized=("wgmma waits",)), {}, "wgmma waits"),
        (SOUND._replace(hazards=("R1 is written",)), {}, "R1 is written"),
    ],
)
def test_what_is_wrong_is_said(
    kernel: Assembled, options: dict[str, Any], said: str, compiler: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = ran(tmp_path / "state", compiler, kernel, **options)
    run.assemble_all()
    assert run.report(["h200", "h100"]) == (1 if said else 0)
    shown = capsys.readouterr().out
    assert said in shown and "13.0.88" in shown


def test_cases_of_other_sources_are_lowered_again_and_kernels_are_not(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(tmp_path / "state", compiler, SOUND)
    monkeypatch.setattr(deviceless, "sources", lambda: "others")
    changed = State(tmp_path / "state")
    assert changed.cases == {} and list(changed.kernels.values()) == [SOUND]


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
