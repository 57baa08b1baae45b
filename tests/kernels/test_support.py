"""Which ptxas compiles Mosaic kernels, and which forms of them it gets right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import ptxas
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.paged_attention.hopper import prefill

SAID = """#!/bin/sh
echo 'ptxas: NVIDIA (R) Ptx optimizing assembler'
echo 'Cuda compilation tools, {said}'
"""
ROOT = Path(__file__).resolve().parents[2]


def compiler(folder: Path, said: str) -> Path:
    """Write a ptxas that only tells its version."""
    program = folder / "bin" / "ptxas"
    program.parent.mkdir(parents=True)
    program.write_text(SAID.format(said=said))
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("said", "release", "trusted"),
    [
        ("release 13.0, V13.0.88", "13.0.88", False),
        ("release 13.3, V13.3.1", "13.3.1", True),
        ("release 14.1", "14.1", True),
        ("a", "", False),
    ],
)
def test_weights_of_prefill_stay_in_registers_from_ptxas_13_3(
    said: str, release: str, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiler(tmp_path, said)
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    assert ptxas.found() == program and ptxas.release(program) == release
    config = prefill.heuristic(AttentionShape(64, 32, 8, 128, 64))
    assert config.p_in_smem != trusted


def test_a_machine_without_ptxas_has_no_release(tmp_path: Path) -> None:
    assert ptxas.release(tmp_path / "ptxas") == "" == ptxas.release(None)


@pytest.mark.parametrize(
    "program", ["from pallas_kernels import ptxas; ptxas.found()", "import pallas_kernels.mosaic.compat"]
)
def test_the_ptxas_of_an_installed_wheel_is_first_on_the_path(program: str, tmp_path: Path) -> None:
    wheel = compiler(tmp_path / "site" / "nvidia" / "cu13", "release 13.5, V13.5.37")
    other = compiler(tmp_path / "other", "release 13.0, V13.0.88")
    given = {**os.environ, "PATH": f"{other.parent}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    given.pop("CUDA_ROOT", None)

    def first(*places: Path) -> str:
        given["PYTHONPATH"] = os.pathsep.join(map(str, [*places, ROOT]))
        command = [sys.executable, "-c", f"{program}\nimport shutil\nprint(shutil.which('ptxas'))"]
        return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.strip()

    assert first(tmp_path / "site") == str(wheel)
    given["CUDA_ROOT"] = str(tmp_path / "other")
    assert first(tmp_path / "site") == str(other), "CUDA_ROOT comes before the wheel, as in XLA"
