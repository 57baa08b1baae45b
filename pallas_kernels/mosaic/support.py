"""Whether Mosaic kernels for Hopper can run here, and which forms of them the compiler gets right."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import ptxas
from pallas_kernels.choice import Here


def unfit(spec: Here) -> str | None:
    """Return None, or the reason why no Hopper kernel runs on the device of `spec`."""
    if spec.interpret:
        return _interpreter()
    if spec.platform != "gpu":
        return f"it needs a GPU; this is {spec.platform}"
    if not spec.capability.startswith("9."):
        capability = spec.capability or "unknown"
        return f"it needs Hopper (compute capability 9.0); {spec.device or 'this device'} has {capability}"
    return None


def interpreter_of(spec: Here) -> Any:
    """Return the interpreter of Hopper kernels, if `spec` asks for it; else None."""
    from pallas_kernels.mosaic.interpret import interpreter

    return interpreter() if spec.interpret else None


def _interpreter() -> str | None:
    from pallas_kernels.mosaic.compat import DETECTS_RACES

    return None if DETECTS_RACES else f"its interpreter needs jax 0.11 or later; this is {jax.__version__}"


def left_in_registers() -> bool:
    """Return whether the ptxas that Mosaic uses compiles wgmma with its left operand in registers correctly."""
    return ptxas.trusted(ptxas.release(ptxas.found()))
