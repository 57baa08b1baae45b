"""What travels to a borrowed machine without a network: wheels of what it lacks, and an executable to try."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

from benchmarks.common import ROOT
from pallas_kernels import ptxas

LIMIT = 64 << 20  # bytes that may travel, the checkout included
PTXAS = "nvidia-cuda-nvcc"
# name: what it is for. Of the compiler's wheel only ptxas is kept.
WHEELS = {"llguidance": "the engine", "msgspec": "the engine", PTXAS: "ptxas 13.3 or later"}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 17)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


class TooLarge(Exception):
    """Raised if more than LIMIT would travel, with the sizes."""


def pack(folder: Path) -> str:
    """Make the folder to carry, and return what it weighs. Raises TooLarge above the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    fetch(folder)
    note = _executable(folder)
    return f"{weighed(folder)}; {note}"


def weighed(folder: Path) -> str:
    """Return the sizes of a folder and of the checkout. Raises TooLarge above the limit."""
    carried = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    paths = [ROOT / os.fsdecode(name) for name in listed if name]
    tree = sum(path.stat().st_size for path in paths if path.is_file() and not path.is_relative_to(folder.resolve()))
    said = f"{carried / 1e6:.1f} MB in {folder} + {tree / 1e6:.1f} MB of checkout"
    if carried + tree > LIMIT:
        raise TooLarge(f"{said} are more than the {LIMIT / 1e6:.1f} MB that may travel")
    return f"{said}, at most {LIMIT / 1e6:.1f} MB"


def asked() -> list[str]:
    """Return the wheels as pip's requirements, with the least versions of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {re.split(r"[<>=!\[; ]", line)[0]: line for line in project["dependencies"]}
    return [found.get(name, name) for name in WHEELS]


def fetch(folder: Path) -> None:
    """Download the wheels for Python 3.12, and leave of the compiler's only ptxas and its license."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(folder), *asked()]
    subprocess.run(command, check=True)
    for wheel in folder.glob(f"{PTXAS.replace('-', '_')}-*.whl"):
        trim(wheel)


def _executable(folder: Path) -> str:
    """Compile the executable of the first part in a process of its own, which sees no device."""
    code = f"from pathlib import Path; from {__package__} import executable; executable.build(Path({str(folder)!r}))"
    from pallas_kernels.gate.targets import TARGETS

    if (reason := TARGETS["h200"].missing()) is not None:
        return f"no executable: {reason}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        return f"no executable: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return "with an executable"


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

    A wheel is a zip file of what goes on the path, so that this needs no pip. The carried ptxas goes first on PATH,
    where Mosaic looks, and CUDA_ROOT names it for XLA. It comes without the device library of CUDA; the toolkit's is
    linked beside it.
    """
    wheels = sorted(folder.glob("*.whl"))
    for name in WHEELS:
        if not any(wheel.name.startswith(f"{name.replace('-', '_')}-") for wheel in wheels):
            print(f"missing: the wheel of {name} in {folder} ({WHEELS[name]}); `--pack {folder}` makes it", flush=True)
    if not site.exists():
        site.mkdir(parents=True)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    for program in site.glob("nvidia/*/bin/ptxas"):
        program.chmod(0o755)
        library = program.parents[1] / "nvvm"
        os.environ["CUDA_ROOT"] = str(library.parent)
        ptxas.prefer()
        if not library.exists() and (ptxas.CUDA / "nvvm").exists():
            library.symlink_to(ptxas.CUDA / "nvvm")
    sys.path.insert(0, str(site))
    return site
