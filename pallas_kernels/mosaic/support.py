"""Whether Mosaic kernels for Hopper can run here, or why not."""

from __future__ import annotations

import jax

from pallas_kernels.choice import Here


def unfit(spec: Here) -> str | None:
    """None, or why no kernel for Hopper runs on the device of `spec`, of attention or of another operation."""
    if spec.interpret:
        return _interpreter()
    if spec.platform != "gpu":
        return f"it is for GPUs; this is {spec.platform}"
    if not spec.capability.startswith("9."):
        found = spec.capability or "unknown"
        return f"it is for Hopper (compute capability 9.0); that of {spec.device or 'this device'} is {found}"
    return None


def _interpreter() -> str | None:
    from pallas_kernels.mosaic.compat import DETECTS_RACES

    return None if DETECTS_RACES else f"its interpreter needs jax 0.11 or later; this is {jax.__version__}"
