"""Executables kept on disk, so that an engine that starts again neither traces, lowers nor compiles a step.

An entry is found by what determines its program: the sources and versions of everything that traces or compiles it,
the settings of compilers and devices, and the shapes, dtypes and shardings of its arguments. jax's own persistent
cache needs the lowered program for its key.

Entries are pickles in part, so only folders and files that belong to this user, and that nobody else can write, are
read; and names in a pickle are resolved in jax, numpy and this project only. Entries that another machine made
(`jaxserve compile`) are read from a folder whose manifest has the digest that the operator names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jaxserve.engine.programs import serialize
from jaxserve.engine.speculation.drafters import Call
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.whole_file import not_ours, write_whole
from pallas_kernels import ptxas

log = logging.getLogger(__name__)

FOLDER = "programs"  # inside the folder of compiled programs
MANIFEST = "manifest.json"
HEAD = b"jaxserve executable 1\n"  # then the SHA-256 of the body, which is compressed
MOST = 4 << 30  # bytes of executables that stay on disk: of the engines that started last
# What jax.config has of files, logs and debugging says nothing about a program.
UNRELATED = ("cache", "log", "traceback", "profiler", "dump", "debug", "coordination", "distributed", "raise", "check")
PACKAGES = ("jax", "jaxlib", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "nvidia-cuda-nvcc")
SET = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_ROOT")  # environment variables that compilers read


class Executables:
    """The executables of one kind of engine in a folder. Thread-safe: entries are files, replaced as a whole."""

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        shipped: Shipped | None = None,
    ) -> None:
        """facts: everything that determines the programs, besides their arguments; see `facts_of`.

        shipped: made by another machine; used where this one has none.
        """
        self._facts: dict[str, Any] = json.loads(json.dumps(facts, sort_keys=True, default=repr))
        self._folder = folder / FOLDER / _digest(json.dumps(self._facts, sort_keys=True))
        self._told = False
        self.loaded = 0
        self.usable = self._prepare()
        self._shipped = shipped if shipped is not None and shipped.fits(self._facts) else None

    def has(self, call: Call) -> bool:
        """Return whether there is an executable of a program, which may still turn out to be damaged."""
        path = self._path(call)
        return (self.usable and path.is_file()) or (self._shipped is not None and self._shipped.has(path.name))

    def load(self, call: Call, devices: Iterable[Any]) -> jax.stages.Compiled | None:
        """Return the executable of a program on `devices`; None if there is none that can be used."""
        path = self._path(call)
        try:
            if self.usable and path.is_file():
                with path.open("rb") as file:
                    if (why := not_ours(os.fstat(file.fileno()))) is not None:
                        raise ValueError(why)
                    data = file.read()
            elif self._shipped is not None and self._shipped.has(path.name):
                path = self._shipped.folder / path.name
                data = self._shipped.read(path.name)
            else:
                return None
            head, digest, body = data[: len(HEAD)], data[len(HEAD) : len(HEAD) + 64], data[len(HEAD) + 64 :]
            if head != HEAD or hashlib.sha256(body).hexdigest().encode() != digest:
                raise ValueError("it is damaged")
            executable = serialize.load_executable(zlib.decompress(body), call.args, tuple(devices))
        except Exception as error:  # whatever is wrong with an entry, compiling again helps
            self._tell("the kept program %s cannot be used (%s): compiling it again", path, error)
            return None
        self.loaded += 1
        return executable

    def compile(self, call: Call, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
        """Compile a program and keep its executable; what cannot be kept is said once.

        options: of the compiler. They are no part of the key, so they must follow from the facts.
        """
        lowered = call.program.lower(*call.args)
        if not self.usable:
            return lowered.compile(options)
        try:
            executable, data = serialize.compile_serialized(lowered, options)
            body = zlib.compress(data, 1)
            write_whole(self._path(call), HEAD + hashlib.sha256(body).hexdigest().encode() + body)
        except (OSError, ValueError, NotImplementedError, AttributeError, TypeError, pickle.PicklingError) as error:
            self._tell("the program %r is not kept (%s): the next start compiles it again", call.label, error)
            return lowered.compile(options)
        return executable

    def ship(self, out: Path) -> str:
        """Copy the executables of this engine to a folder, and return the digest of their manifest.

        Raises InvalidValue if there are none, or if the folder has other files.
        """
        files = sorted(path for path in self._folder.iterdir() if not path.suffix) if self.usable else []
        if not files:
            raise InvalidValue(f"no executable is kept in {self._folder}: see the warnings above", "out")
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise InvalidValue(f"out={str(out)!r} must be an empty folder, or one to be made", "out")
        hashes = {}
        for path in files:
            data = path.read_bytes()
            (out / path.name).write_bytes(data)
            hashes[path.name] = hashlib.sha256(data).hexdigest()
        manifest = json.dumps({"facts": self._facts, "files": hashes}, sort_keys=True, indent=1).encode()
        (out / MANIFEST).write_bytes(manifest)
        return hashlib.sha256(manifest).hexdigest()

    def _path(self, call: Call) -> Path:
        return self._folder / _digest(f"{call.label} {described(call.args)}")

    def _prepare(self) -> bool:
        """Make the folder, forget those of engines that have not started for long; return whether it can be used."""
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(exist_ok=True, mode=0o700)
            os.utime(self._folder)
            engines = [path for path in self._folder.parent.iterdir() if path.is_dir() and path != self._folder]
            room = MOST - _size(self._folder)
            for engine in sorted(engines, key=lambda path: path.stat().st_mtime, reverse=True):
                room -= _size(engine)
                if room < 0:
                    shutil.rmtree(engine, ignore_errors=True)
        except OSError as error:
            self._tell("programs are not kept: %s", error)
            if not self._folder.is_dir():
                return False
        for path in (self._folder.parent, self._folder):
            if (why := not_ours(path.lstat())) is not None:
                self._tell("programs are neither kept nor used: %s %s", path, why)
                return False
        return True

    def _tell(self, text: str, *values: object) -> None:
        if not self._told:
            log.warning(text, *values)
        self._told = True


def options_for(platform: str) -> dict[str, Any]:
    """Return the compiler's options. On a CPU, LLVM's higher levels take a fifth longer and make no step faster."""
    return {"xla_backend_optimization_level": 1} if platform == "cpu" else {}


def remembered(folder: Path, facts: Mapping[str, Any], measured: Callable[[], int]) -> int:
    """Return a number that compiled programs determine: from an earlier start with equal facts, or measured now."""
    known = json.dumps(facts, sort_keys=True, default=repr)
    path = folder / FOLDER / f"{_digest(known)}.number"
    try:
        if not_ours(path.lstat()) is None:
            return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        pass
    number = measured()
    with contextlib.suppress(OSError):  # measured again at the next start
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, str(number).encode())
    return number


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 if another process removes it now."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:
        return 0


class Shipped:
    """Executables that another machine made (`jaxserve compile`), which the operator trusts by their digest."""

    def __init__(self, folder: Path, digest: str) -> None:
        """digest: SHA-256 of the manifest. Raises InvalidValue if the manifest is missing or has another one."""
        self.folder = folder
        try:
            manifest = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise InvalidValue(
                f"programs={str(folder)!r} has no readable {MANIFEST} ({error.strerror}): `jaxserve compile` writes it",
                "programs",
            ) from error
        if (actual := hashlib.sha256(manifest).hexdigest()) != digest.lower().removeprefix("sha256:"):
            raise InvalidValue(f"programs={str(folder)!r} has the digest {actual}, not {digest}: not used", "digest")
        read = json.loads(manifest)
        self._facts: dict[str, Any] = read["facts"]
        self._files: dict[str, str] = read["files"]

    def fits(self, facts: Mapping[str, Any]) -> bool:
        """Return whether the executables are of an engine with these facts; say once what differs."""
        differ = [name for name in {**facts, **self._facts} if facts.get(name) != self._facts.get(name)]
        if differ:
            log.warning("programs=%s is for another engine (%s): not used", self.folder, ", ".join(differ))
        return not differ

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name."""
        return name in self._files

    def read(self, name: str) -> bytes:
        """Return an entry. Raises ValueError if it is not the one of the manifest, OSError if it cannot be read."""
        data = (self.folder / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != self._files[name]:
            raise ValueError(f"it is not the one in {MANIFEST}")
        return data


def facts_of(device: Any, **more: Any) -> dict[str, Any]:
    """Return what determines the programs of an engine: `more`, and everything outside of it that compilers read."""
    settings = {
        name: value for name, value in sorted(jax.config.values.items()) if not any(word in name for word in UNRELATED)
    }
    return {
        **more,
        "sources": sources(),
        "python": sys.version_info[:2],
        "packages": {name: _version(name) for name in PACKAGES},
        "settings": settings,
        "environment": {name: os.environ.get(name, "") for name in SET},
        "platform": [device.platform, device.device_kind, str(device.client.platform_version)],
        "processes": jax.process_count(),
        "processor": processor() if device.platform == "cpu" else "",
        "ptxas": ptxas.release(ptxas.found()) if device.platform == "gpu" else "",
    }


@cache
def sources() -> str:
    """Return a digest of every file of this project: of what traces programs, and of tuned tables."""
    total = hashlib.sha256()
    for package in ("jaxserve", "pallas_kernels"):
        root = Path(sys.modules[package].__file__ or "").parent
        # Through links: in a checkout, the scheduler and the presets are behind some.
        files = [Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names]
        for path in sorted(path for path in files if path.suffix in (".py", ".json", ".yaml")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{package}/{path.relative_to(root)} {content}\n".encode())
    return total.hexdigest()


@cache
def processor() -> str:
    """Return a digest of the CPU's model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [os.uname().machine] if hasattr(os, "uname") else []
    return _digest("\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})))


def described(args: Any) -> str:
    """Describe arguments by what a compiled program depends on: tree, shapes, dtypes and shardings."""
    leaves, tree = jax.tree.flatten(args)
    return f"{tree} {[_leaf(leaf) for leaf in leaves]}"


def _leaf(leaf: Any) -> tuple[Any, ...]:
    sharding = getattr(leaf, "sharding", None)
    placed = (str(sharding.spec), str(dict(sharding.mesh.shape)), sharding.memory_kind) if sharding is not None else ()
    return (leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False), *placed)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
