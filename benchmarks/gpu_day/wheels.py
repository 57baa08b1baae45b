"""The wheels that a borrowed machine without a network lacks: the list, the download, and the use of the folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from . import probe

PTXAS = "nvidia-cuda-nvcc"
# name: (bytes of the wheel for Python 3.12 on manylinux x86-64, what it is for)
WHEELS = {
    "fastapi": (159_475, "serving over HTTP"),
    "starlette": (80_571, "fastapi"),
    "pydantic": (494_865, "fastapi"),
    "pydantic-core": (2_264_846, "pydantic"),
    "annotated-types": (13_427, "pydantic"),
    "annotated-doc": (5_286, "fastapi"),
    "typing-inspection": (14_874, "pydantic"),
    "opentelemetry-api": (60_335, "fastapi"),
    "uvicorn": (87_427, "serving over HTTP"),
    "httptools": (552_848, "serving over HTTP"),
    PTXAS: (16_700_060, "ptxas 13.3 or later; only this program of a wheel of 47 MB"),
}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux1_x86_64")  # fmt: skip


def table() -> str:
    """Return the list, with sizes."""
    lines = [f"{name:20} {size / 1e6:6.2f} MB  {what}" for name, (size, what) in WHEELS.items()]
    total = sum(size for size, _ in WHEELS.values())
    return "\n".join([*lines, f"{'total':20} {total / 1e6:6.2f} MB"])


def fetch(folder: Path) -> None:
    """Download the wheels for Python 3.12, and leave of the compiler's only ptxas and its license."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(folder), *WHEELS]
    subprocess.run(command, check=True)
    for wheel in folder.glob(f"{PTXAS.replace('-', '_')}-*.whl"):
        trim(wheel)
    total = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {total / 1e6:.1f} MB in {folder}")


def trim(wheel: Path) -> None:
    """Rewrite a compiler's wheel with nothing but ptxas and the metadata."""
    partial = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as kept:
        for member in whole.infolist():
            path = PurePosixPath(member.filename)
            if path.name == "ptxas" or path.parts[0].endswith(".dist-info"):
                kept.writestr(member, whole.read(member), zipfile.ZIP_DEFLATED)
    os.replace(partial, wheel)


def unpack(folder: Path, site: Path) -> Path:
    """Unpack the wheels of a folder into `site`, which goes on the path of this process, and return it.

    A wheel is a zip file of what goes on the path, so that this needs no pip. The carried ptxas comes without the
    device library of CUDA; the toolkit's is linked beside it.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"no wheels in {folder}; `python -m benchmarks.gpu_day --fetch-wheels {folder}` makes them")
    if not site.exists():
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    for program in site.glob("nvidia/*/bin/*"):
        program.chmod(0o755)
        library = program.parents[1] / "nvvm"
        if program.name != "ptxas":
            continue
        os.environ["CUDA_ROOT"] = str(library.parent)  # read by jax, and by the probe
        if not library.exists() and (probe.CUDA / "nvvm").exists():
            library.symlink_to(probe.CUDA / "nvvm")
    sys.path.insert(0, str(site))
    return site
