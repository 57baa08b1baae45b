"""Tests of the compiled kernels on a Hopper GPU; elsewhere they skip with the reason.

`JAXSERVE_GPU_TESTS=interpret` runs them in the interpreter instead, to test the tests.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

INTERPRETED = "JAXSERVE_GPU_TESTS"


@cache
def why_not() -> str:
    """Return why the kernels cannot run here, or nothing if they can."""
    import jax

    from pallas_kernels.mosaic import compat

    if os.environ.get(INTERPRETED) == "interpret":
        if jax.default_backend() == "gpu":
            return f"{INTERPRETED}=interpret needs JAX_PLATFORMS=cpu here"
        return "" if compat.DETECTS_RACES else f"the interpreter of jax {jax.__version__} runs few kernels; 0.11 all"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs a Hopper GPU; jax found a {device.platform}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    return (
        "" if capability.startswith("9.") else f"it needs compute capability 9; {device.device_kind} has {capability}"
    )


@pytest.fixture(autouse=True)
def hopper() -> None:
    """Skip where the kernels cannot run."""
    if reason := why_not():
        pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Do not fail for warnings here: those of a driver or of another jax say nothing about a kernel's numbers."""
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.filterwarnings("default"))
