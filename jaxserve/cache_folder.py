"""Where compiled programs, and what was measured of them, are kept between starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder: JAXSERVE_CACHE_DIR, else jax's configured cache folder, else ~/.cache/jaxserve/xla.

    Does not import jax, whose configuration before its import is its environment variable.
    """
    jax = sys.modules.get("jax")
    configured = jax.config.jax_compilation_cache_dir if jax else os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(os.environ.get("JAXSERVE_CACHE_DIR") or configured or Path.home() / ".cache" / "jaxserve" / "xla")
