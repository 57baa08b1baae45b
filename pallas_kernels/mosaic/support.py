"""Whether Mosaic kernels for Hopper can run here, and which forms of them the compiler gets right."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import jax

from pallas_kernels.choice import Here

PTXAS = (13, 3)  # the first ptxas that compiles wgmma with its left operand in registers correctly


def unfit(spec: Here) -> str | None:
    """Return None, or the reason why no Hopper kernel runs on the device of `spec`."""
    if spec.interpret:
        return _interpreter()
    if spec.platform != "gpu":
        return f"it needs a GPU; this is {spec.platform}"
    if not spec.capability.startswith("9."):
        found = spec.capability or "unknown"
        return f"it needs Hopper (compute capability 9.0); {spec.device or 'this device'} has {found}"
    return None


def _interpreter() -> str | None:
    from pallas_kernels.mosaic.compat import DETECTS_RACES

    return None if DETECTS_RACES else f"its interpreter needs jax 0.11 or later; this is {jax.__version__}"


def left_in_registers() -> bool:
    """Return whether the ptxas that Mosaic uses compiles wgmma with its left operand in registers correctly."""
    from pallas_kernels.mosaic.compat import cuda_root

    return ptxas_version(cuda_root() / "bin" / "ptxas") >= PTXAS


@cache
def ptxas_version(program: Path) -> tuple[int, ...]:
    """Return the version of a ptxas as (major, minor); () if it is missing or does not say."""
    if not program.exists():
        return ()
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()
