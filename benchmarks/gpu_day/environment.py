"""What a part on the engine sets before jax touches a device."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.engine.startup.environment import known

from .part import Run

MEMORY = "0.92"  # share of the device's memory for jax: the default leaves a quarter to others


def prepare(run: Run, flags: str = "") -> None:
    """Set the variables that jax reads when it starts its backend, and that a part's children inherit.

    flags: added to XLA_FLAGS. They have no effect in a process whose backend has started.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY)
    os.environ.setdefault("JAXSERVE_CACHE_DIR", str(run.folder / "cache"))
    if flags:
        os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), flags)))


def cache(run: Run) -> Path:
    """Return the folder of compiled programs, which later parts load."""
    return Path(os.environ.get("JAXSERVE_CACHE_DIR") or run.folder / "cache")


def accepted(flags: str) -> bool:
    """Return whether this jaxlib knows the flags: it ends the process at a flag that it does not know."""
    return not flags or known(flags)
