"""Say what a machine lacks before anything runs on it, and what that excludes; needs no jax and no device."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pallas_kernels import ptxas

PACKAGES = {  # what runs only with it
    "jax": "everything",
    "jaxlib": "everything",
    "jax-cuda13-plugin": "everything",
    "jax-cuda13-pjrt": "everything",
    "flax": "the engine",
    "transformers": "the engine",
    "llguidance": "the engine",
    "msgspec": "the engine",
    "pytest": "checks of kernels",
    "hypothesis": "checks of kernels",
    "rich": "progress bars",
    "matplotlib": "plots",
    "torch": "torch as a peer",
}


def machine() -> dict[str, Any]:
    """Return driver, runtime, compiler, tools and packages of this machine."""
    asked = ("name", "driver_version", "power.limit", "clocks.max.sm", "memory.total")
    path = ptxas.found()
    return {
        "nvidia_smi": said("nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader").partition("\n")[0],
        "cuda_runtime": installed("nvidia-cuda-runtime")
        or release(said(str(ptxas.CUDA / "bin" / "nvcc"), "--version")),
        "ptxas": ptxas.release(path),
        "ptxas_path": str(path or ""),
        "compute_sanitizer": sanitizer() or "",
        "git": shutil.which("git") or "",
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
    }


def missing(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (what is missing, what that excludes)."""
    lacks = []
    if not found["nvidia_smi"]:
        lacks.append(("NVIDIA driver (nvidia-smi)", "everything but --dry"))
    if not found["ptxas"]:
        lacks.append(("ptxas", "Mosaic kernels"))
    elif not ptxas.trusted(found["ptxas"]):
        lacks.append((f"ptxas 13.3 or later (this is {found['ptxas']})", "kernels with weights in registers"))
    if not found["compute_sanitizer"]:
        lacks.append(("compute-sanitizer", "memcheck"))
    if not found["git"]:
        lacks.append(("git", "the commit in the report"))
    return lacks + [(name, what) for name, what in PACKAGES.items() if name not in found["packages"]]


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(ptxas.CUDA / "bin"))


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def release(text: str) -> str:
    """Return the release that a CUDA tool states: "... release 13.0, V13.0.48" gives 13.0."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else ""


def said(*command: str) -> str:
    """Return what a command prints, or nothing if there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def show(found: dict[str, Any], lacks: Sequence[tuple[str, str]]) -> None:
    """Print what is here and what is missing."""
    here = [f"device {found['nvidia_smi']}"] if found["nvidia_smi"] else []
    here += [f"CUDA {found['cuda_runtime']}"] if found["cuda_runtime"] else []
    here += [f"ptxas {found['ptxas']} ({found['ptxas_path']})"] if found["ptxas"] else []
    here += [f"Python {sys.version.split()[0]}", f"jax {found['packages'].get('jax', 'missing')}"]
    print("; ".join(here), flush=True)
    for what, excludes in lacks:
        print(f"missing: {what}; excludes {excludes}", flush=True)
