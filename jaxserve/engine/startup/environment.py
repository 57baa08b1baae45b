"""Set the variables that jax, XLA and CUDA read once, when jax starts its backend. Imports no jax.

Variables that are set already are left alone.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

SHARES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # jax refuses to start if both are set
DEFAULT_SHARE = 0.75  # of a GPU's memory, which jax reserves if neither is set
MOST = 0.95  # share of a GPU's memory to reserve at most, unless --gpu-memory-utilization is above it
SPARE = 0.05  # share beyond --gpu-memory-utilization: transfers of KV, autotuning, fragmentation
LOADING = "CUDA_MODULE_LOADING"


def prepare(
    utilization: float,
    *,
    environment: MutableMapping[str, str] = os.environ,
    gpus: int | None = None,
) -> None:
    """Set what `variables` returns, or log what is lost because jax has started already.

    utilization: --gpu-memory-utilization. gpus: their number; None: see `gpus_here`.
    """
    lost = variables(utilization, environment, gpus_here() if gpus is None else gpus)
    if not lost:
        return
    platform = started()
    if platform is None:
        environment.update(lost)
    elif platform == "gpu":
        log.warning(
            "jax started before the engine, without %s: %s; set them in the environment, or create the engine before "
            "other uses of jax",
            " ".join(f"{name}={value}" for name, value in lost.items()),
            "; ".join(_loss(name, environment) for name in lost),
        )


def variables(utilization: float, environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return the variables to set: those of the engine that the environment does not have.

    Libraries of several GPUs are loaded at start, because a GPU that loads a kernel waits for its running kernels,
    among them a collective that waits for that GPU (openxla/xla#38932). With one GPU this would only take memory.
    """
    variables = {}
    if not any(name in environment for name in SHARES):
        variables[SHARES[0]] = f"{min(utilization + SPARE, max(utilization, MOST)):.4g}"
    if gpus > 1 and LOADING not in environment:
        variables[LOADING] = "EAGER"
    return variables


def reserved_share(environment: Mapping[str, str] = os.environ) -> float:
    """Return the share of a GPU's memory that jax's allocator has."""
    return float(next((environment[name] for name in SHARES if environment.get(name)), DEFAULT_SHARE))


def gpus_here(devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that this process may open, without loading CUDA."""
    return len(list(devices.glob("nvidia[0-9]*")))


def started() -> str | None:
    """Return the platform that jax has started, or None. Starts nothing."""
    if "jax" not in sys.modules:
        return None
    import jax

    from jaxserve.engine.programs.compat import backend_started

    return jax.default_backend() if backend_started() else None


def _loss(name: str, environment: Mapping[str, str]) -> str:
    return {
        SHARES[0]: f"weights and KV cache have {reserved_share(environment):.0%} of the GPU's memory",
        LOADING: "kernels are loaded at their first launch, which can block collectives of several GPUs",
    }[name]
