"""Which `ptxas` compiles Mosaic's kernels; needs no jax.

Mosaic (jax 0.10.2 to 0.12) runs the first `ptxas` on PATH, else that of /usr/local/cuda. CUDA_ROOT
and the wheel nvidia-cuda-nvcc, which XLA uses for its own kernels, do not reach it. So the folder of
their `ptxas` is put first on PATH, before anything compiles: then both use the same one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

CUDA = Path("/usr/local/cuda")
CORRECT = (13, 3)  # the first release that compiles wgmma with its left operand in registers correctly
PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvcc")  # of the wheels nvidia-cuda-nvcc and nvidia-cuda-nvcc-cu12


def prefer() -> None:
    """Put the folder of the `ptxas` of CUDA_ROOT, or else of an installed wheel, first on PATH, if there is one."""
    program = _of_xla()
    if program is not None:
        others = [
            folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder != str(program.parent)
        ]
        os.environ["PATH"] = os.pathsep.join([str(program.parent), *others])


def found() -> Path | None:
    """Return the `ptxas` that compiles Mosaic's kernels in this process; None if there is none."""
    prefer()
    program = Path(shutil.which("ptxas") or CUDA / "bin" / "ptxas")
    return program if program.exists() else None


def release(program: Path | None) -> str:
    """Return the release of a `ptxas`, such as "13.5.37"; "" if it is missing or does not say."""
    return _release(program, program.stat().st_mtime_ns) if program is not None and program.exists() else ""


def trusted(release: str) -> bool:
    """Return whether a release of `ptxas` compiles wgmma with its left operand in registers correctly."""
    return tuple(map(int, re.findall(r"\d+", release)[:2])) >= CORRECT


@cache
def _release(program: Path, _: int) -> str:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    stated = re.search(r"release \d+\.\d+, V(\d+\.\d+(?:\.\d+)?)", said) or re.search(r"release (\d+\.\d+)", said)
    return stated[1] if stated else ""


def _of_xla() -> Path | None:
    places = [Path(os.environ["CUDA_ROOT"])] if os.environ.get("CUDA_ROOT") else []
    for name in PACKAGES:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        places += [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    return next((path for place in places if (path := place / "bin" / "ptxas").exists()), None)
