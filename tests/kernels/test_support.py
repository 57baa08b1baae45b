"""What the compiler of Mosaic kernels gets right: forms of kernels follow the version of ptxas."""

from __future__ import annotations

from pathlib import Path

import pytest

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.mosaic.support import ptxas_version
from pallas_kernels.ops.paged_attention.hopper import prefill

SAID = """#!/bin/sh
echo 'ptxas: NVIDIA (R) Ptx optimizing assembler'
echo 'Cuda compilation tools, {said}, V{said}.37'
"""


def compiler(folder: Path, said: str) -> Path:
    """Write a ptxas that only tells its version, and return its folder."""
    program = folder / "bin" / "ptxas"
    program.parent.mkdir()
    program.write_text(SAID.format(said=said))
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("said", "version"), [("release 13.0", (13, 0)), ("release 13.3", (13, 3)), ("release 14.1", (14, 1)), ("a", ())]
)
def test_weights_of_prefill_stay_in_registers_from_ptxas_13_3(
    said: str, version: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = compiler(tmp_path, said)
    assert ptxas_version(root / "bin" / "ptxas") == version
    monkeypatch.setattr(compat, "cuda_root", lambda: root)
    config = prefill.heuristic(AttentionShape(64, 32, 8, 128, 64))
    assert config.p_in_smem == (version < (13, 3))


def test_a_machine_without_ptxas_has_no_version(tmp_path: Path) -> None:
    assert ptxas_version(tmp_path / "ptxas") == ()
