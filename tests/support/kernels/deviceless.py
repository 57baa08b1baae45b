"""Compile every program of tests/gpu for a Hopper GPU that is not there.

    python -m tests.support.kernels.deviceless                     # all cases, with the installed ptxas
    python -m tests.support.kernels.deviceless --ptxas OTHER mla   # cases that match, with another ptxas too

A case runs in a process of its own, in which `jax.jit`, `compat.kernel` and `compat.in_place` compile
for the target and return zeros: its comparison with float64 then fails, which counts for nothing.
Each distinct PTX is assembled once per ptxas. Cases that ask for the release of ptxas are lowered
again for each one, because their programs may depend on it. The PTX of the first case of each family
must be the same for all targets.

Exits 1 if a case does not compile, or spilled registers cost time (pallas_kernels/gate/figures.py), or
wgmma is serialized, or a register of a wgmma in flight is written. A folder of state keeps what is
done, so that a run that was cut off resumes.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pallas_kernels import ptxas
from pallas_kernels.gate import figures, sass
from pallas_kernels.gate.targets import TARGETS, Target, prepare

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("pallas_kernels/*.py", "pallas_kernels/mosaic", "pallas_kernels/ops", "tests/gpu", "tests/support/kernels")
CASES = "tests.gpu.test_numerics"
NOISE = re.compile(r"^\s*(?:\.version|\.loc|\.file|//|\$L__tmp).*\n", re.MULTILINE)  # says nothing about the program
LIMIT = 1800.0  # seconds per case


@dataclass(frozen=True)
class Program:
    """A case of a family to lower with one ptxas for one target."""

    family: str
    case: str
    target: str
    ptxas: Path

    @property
    def name(self) -> str:
        return f"{self.family}: {self.case}"


@dataclass(frozen=True)
class Lowered:
    """The PTX of a program's kernels, or why there is none."""

    ptx: tuple[str, ...] = ()
    skipped: str = ""
    asked: bool = False  # for the release of ptxas
    seconds: float = 0.0
    processor: float = 0.0


class Assembled(NamedTuple):
    """A kernel as machine code of one ptxas."""

    registers: int
    spills: int
    spilling: tuple[str, ...]
    serialized: tuple[str, ...]
    hazards: tuple[str, ...]
    seconds: float


class Compiler:
    """Replaces what runs a program by what compiles it, in a process that forks before it uses jax's devices."""

    def __init__(self) -> None:
        self.mesh: Any = None
        self.asked = False
        self.compiled = 0

    def install(self) -> ModuleType:
        """Patch jax and the kernels, and return the module of the cases."""
        import jax
        from jax._src import xla_bridge

        from benchmarks.gpu_day import probe
        from pallas_kernels.mosaic import compat
        from tests.support.kernels import interpreted

        interpreted.on_gpu = lambda: True
        self._jit, jax.jit = jax.jit, self.jit
        kernel, in_place = compat.kernel, compat.in_place

        def compiled_kernel(body: Any, **options: Any) -> Any:
            run = kernel(body, **options)
            return lambda *given: self.run(lambda *them: run(*them), given)

        def compiled_in_place(body: Any, *, changed: Any, read: Any, **options: Any) -> Any:
            return self.run(lambda *them: in_place(body, changed=them[0], read=them[1], **options), (changed, read))

        compat.kernel, compat.in_place = compiled_kernel, compiled_in_place
        ptxas.release, probe.machine = self.noted(ptxas.release), self.noted(probe.machine)
        module = importlib.import_module(CASES)
        if xla_bridge.backends_are_initialized():
            raise RuntimeError("importing the cases started a backend of jax, whose threads would not survive a fork")
        return module

    def noted(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*given: Any) -> Any:
            self.asked = True
            return ask(*given)

        return asked

    def jit(self, fun: Any = None, **options: Any) -> Any:
        if fun is None:
            return lambda given: self.jit(given, **options)
        return _Jitted(self, self._jit(fun, **options), fun, options)

    def run(self, fun: Callable[..., Any], given: Sequence[Any]) -> Any:
        import jax

        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given))
        return fun(*given) if traced or self.mesh is None else self.jit(fun)(*given)


class _Jitted:
    """What `jax.jit` returns: compiles for the target when it is called with arrays, and returns zeros."""

    def __init__(self, compiler: Compiler, made: Any, fun: Any, options: dict[str, Any]) -> None:
        self._compiler, self._made, self._options = compiler, made, options
        self.__wrapped__ = fun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = self._compiler.mesh
        if mesh is None or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((given, named))):
            return self._made(*given, **named)

        def described(x: Any) -> Any:
            array = hasattr(x, "shape") and hasattr(x, "dtype")
            whole = NamedSharding(mesh, PartitionSpec())
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) if array else x

        static = self._options.get("static_argnames") or ()
        shapes = {name: x if name in static else jax.tree.map(described, x) for name, x in named.items()}
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                lowered = self._made.lower(*jax.tree.map(described, given), **shapes)
                lowered.compile()
        except AssertionError as error:
            raise RuntimeError("an assertion while compiling") from error  # is no comparison that fails
        self._compiler.compiled += 1
        return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), lowered.out_info)


COMPILER = Compiler()


def lower(program: Program, target: Target) -> Lowered:
    """Compile a program in this process, which has compiled nothing before. Raises what the compilers raise."""
    import pytest

    from pallas_kernels.gate.cases import mesh_of

    os.environ["CUDA_ROOT"] = str(program.ptxas.parents[1])
    ptxas.prefer()
    skipped, began = "", time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="deviceless-") as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        COMPILER.mesh, COMPILER.asked = mesh_of(target.devices()[:1]), False
        try:
            sys.modules[CASES].FAMILIES[program.family][program.case]()
        except AssertionError:  # zeros are not what float64 says
            if not COMPILER.compiled:
                raise
        except pytest.skip.Exception as reason:
            skipped = str(reason)
        finally:
            COMPILER.mesh = None
        texts = tuple(path.read_text() for path in sorted(Path(folder).glob("*.ptx")))
    if not COMPILER.compiled and not skipped:
        raise RuntimeError("nothing was compiled")
    return Lowered(texts, skipped, COMPILER.asked, time.perf_counter() - began, sum(os.times()[:4]))


def digest(ptx: str) -> str:
    """Return a digest of what a PTX computes, which does not depend on the version of the language."""
    return hashlib.sha256(NOISE.sub("", ptx).encode()).hexdigest()[:16]


def assemble(ptx: str, program: Path, disassembler: Path) -> Assembled:
    """Compile a PTX with a ptxas, and read its machine code. Raises RuntimeError with its message if it refuses."""
    began = time.perf_counter()
    major, minor = map(int, ptxas.release(program).split(".")[:2])
    told = re.sub(r"(?m)^\.version .*", f".version {major - 4}.{minor}", ptx)  # CUDA 13.5 has PTX 9.5
    with tempfile.TemporaryDirectory(prefix="deviceless-") as folder:
        source, code = Path(folder) / "a.ptx", Path(folder) / "a.cubin"
        source.write_text(told)
        command = [program, source, "-o", code, "-arch=sm_90a", "--warn-on-spills", "-v", "--generate-line-info"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        found: dict[str, Any] = figures.assembled([done.stderr])
        machine = subprocess.run([disassembler, "-c", code], capture_output=True, text=True, check=True).stdout
        return Assembled(
            **found,
            spilling=tuple(figures.spilling(done.stderr, machine)),
            hazards=tuple(sass.hazards(machine)),
            seconds=time.perf_counter() - began,
        )


@dataclass
class State:
    """What is done: PTX by digest, and lines of JSON of lowered cases and of assembled kernels."""

    folder: Path
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    kernels: dict[str, Assembled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "ptx").mkdir(parents=True, exist_ok=True)
        self._sources = sources()
        for row in self._rows("cases"):
            if row["sources"] == self._sources:
                self.cases[row["key"]] = row
        for row in self._rows("kernels"):
            key = row.pop("key")
            told = {name: tuple(x) if isinstance(x, list) else x for name, x in row.items()}
            self.kernels[key] = Assembled(**told)

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        yield from map(json.loads, path.read_text().splitlines() if path.exists() else ())

    def _write(self, name: str, row: dict[str, Any]) -> None:
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def lowered(self, program: Program, outcome: Lowered | str) -> None:
        """Keep a program's PTX; a failure is told, and tried again by the next run."""
        if isinstance(outcome, str):
            self.cases[key_of(program)] = {"failed": outcome}
            return
        for ptx in outcome.ptx:
            path = self.path(digest(ptx))
            if not path.exists():
                path.write_text(ptx)
        kernels = sorted({digest(ptx) for ptx in outcome.ptx})
        row = {"key": key_of(program), "sources": self._sources, **asdict(replace(outcome, ptx=())), "ptx": kernels}
        self.cases[row["key"]] = row
        self._write("cases", row)

    def assembled(self, key: str, kernel: Assembled) -> None:
        self.kernels[key] = kernel
        self._write("kernels", {"key": key, **kernel._asdict()})

    def path(self, kernel: str) -> Path:
        return self.folder / "ptx" / f"{kernel}.ptx"


def sources() -> str:
    """Return a digest of the code that makes the programs, and of its jax."""
    places = [path for place in SOURCES for path in ROOT.glob(place)]
    files = sorted(path for place in places for path in ([place] if place.is_file() else place.rglob("*.py")))
    files.remove(Path(__file__))
    text = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256(f"{version('jax')} {text}".encode()).hexdigest()[:16]


def key_of(program: Program) -> str:
    return f"{program.name} | {program.target} | {ptxas.release(program.ptxas)}"


def parser() -> argparse.ArgumentParser:
    head, rest = (__doc__ or "").split("\n", 1)
    made = argparse.ArgumentParser(
        prog="python -m tests.support.kernels.deviceless",
        description=head + rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("patterns", nargs="*", help="only cases whose name, `family: case`, contains a shell pattern")
    made.add_argument(
        "--ptxas", metavar="FILE", type=Path, action="append", default=[], help="another ptxas, in a folder named bin"
    )
    made.add_argument("--state", metavar="FOLDER", type=Path, default=ROOT / ".ci" / "device-programs")
    made.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    targets = [TARGETS["h200"], TARGETS["h100"]]
    if (reason := targets[0].missing()) is not None:
        print(f"nothing can be compiled here: {reason}", file=sys.stderr)
        return 1
    for target in targets:
        prepare(target)
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"  # as tests/conftest.py does
    installed = ptxas.found()
    assert installed is not None
    compilers = [installed, *(path.resolve() for path in args.ptxas)]
    state, module = State(args.state), COMPILER.install()
    run = Run(state, chosen(module, args.patterns), compilers, args.jobs)
    run.lower_all([target.name for target in targets])
    run.assemble_all()
    return run.report([target.name for target in targets])


def chosen(module: ModuleType, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Return the family and name of each case of the module."""
    cases = [(family, case) for family, known in module.FAMILIES.items() for case in known]
    wanted = [f"*{pattern}*" for pattern in patterns]
    return [one for one in cases if not wanted or any(fnmatch.fnmatchcase(": ".join(one), each) for each in wanted)]


class Run:
    """Lowers cases, assembles their kernels and reports both."""

    def __init__(self, state: State, cases: Sequence[tuple[str, str]], compilers: Sequence[Path], jobs: int) -> None:
        self.state, self.cases, self.compilers, self.jobs = state, cases, compilers, jobs
        self.refused: dict[str, str] = {}

    def lower_all(self, targets: Sequence[str]) -> None:
        first = dict(reversed(self.cases))
        for name in targets:
            cases = self.cases if name == targets[0] else list(first.items())
            self._lower(name, [Program(*case, name, self.compilers[0]) for case in cases])
        for other in self.compilers[1:]:
            programs = [Program(*case, targets[0], self.compilers[0]) for case in self.cases]
            asked = [one for one in programs if self.state.cases[key_of(one)].get("asked")]
            self._lower(targets[0], [replace(one, ptxas=other) for one in asked])

    def _lower(self, target: str, programs: Sequence[Program]) -> None:
        from pallas_kernels.gate.compiling import compile_all

        todo = [program for program in programs if key_of(program) not in self.state.cases]
        done = len(programs) - len(todo)

        def tell(program: Program, outcome: Lowered | str) -> None:
            nonlocal done
            done += 1
            self.state.lowered(program, outcome)
            told = outcome if isinstance(outcome, str) else outcome.skipped or f"{outcome.seconds:.1f} s"
            print(f"[{done}/{len(programs)}] {key_of(program)}: {told}", file=sys.stderr, flush=True)

        compile_all(todo, TARGETS[target], jobs=self.jobs, tell=tell, limit=LIMIT, work=lower)

    def of(self, family: str, case: str, target: str, compiler: Path) -> dict[str, Any]:
        """Return the row of a case; of another ptxas, if its program depends on that, or else of the first."""
        rows, program = self.state.cases, Program(family, case, target, compiler)
        return rows.get(key_of(program)) or rows[key_of(replace(program, ptxas=self.compilers[0]))]

    def assemble_all(self) -> None:
        wanted = {
            (kernel, compiler): None
            for compiler in self.compilers
            for case in self.cases
            for kernel in self.of(*case, "h200", compiler).get("ptx", ())
        }

        disassembler = self.compilers[0].with_name("nvdisasm")

        def work(kernel: str, compiler: Path) -> None:
            key = f"{kernel} {ptxas.release(compiler)}"
            if key in self.state.kernels:
                return
            try:
                self.state.assembled(key, assemble(self.state.path(kernel).read_text(), compiler, disassembler))
            except RuntimeError as error:
                self.refused[key] = str(error)

        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(lambda pair: work(*pair), wanted))

    def report(self, targets: Sequence[str]) -> int:
        """Print the table and what is wrong; return the exit status."""
        wrong = [*self._failures(targets)]
        head = (
            "ptxas", "cases", "skipped", "PTX", "registers", "spilling", "bytes", "hazards", "lowering s", "ptxas s"
        )  # fmt: skip
        print(f"{', '.join(targets)}; jax {version('jax')}")
        print("  ".join(head))
        for compiler in self.compilers:
            release, rows = ptxas.release(compiler), [self.of(*case, targets[0], compiler) for case in self.cases]
            kernels = {kernel for row in rows for kernel in row.get("ptx", ())}
            found = [made for one in kernels if (made := self.state.kernels.get(f"{one} {release}"))]
            cells = (
                release, len(rows), sum(bool(row.get("skipped")) for row in rows), len(kernels),
                max((one.registers for one in found), default=0), sum(one.spills > 0 for one in found),
                sum(one.spills for one in found), sum(len(one.hazards) for one in found),
                round(sum(row.get("seconds", 0) for row in rows)), round(sum(one.seconds for one in found)),
            )  # fmt: skip
            print("  ".join(str(cell).ljust(len(name)) for cell, name in zip(cells, head, strict=True)))
        print(*wrong, sep="\n")
        return 1 if wrong else 0

    def _failures(self, targets: Sequence[str]) -> Iterator[str]:
        for family, case in self.cases:
            for compiler in self.compilers:
                yield from self._of_case(f"{family}: {case}", self.of(family, case, targets[0], compiler), compiler)
        for family, case in dict(reversed(self.cases)).items():
            made = {tuple(self.of(family, case, name, self.compilers[0]).get("ptx", ())) for name in targets}
            if len(made) > 1:
                yield f"FAILED {family}: {case}: its PTX is not the same for {' and '.join(targets)}"

    def _of_case(self, name: str, row: dict[str, Any], compiler: Path) -> Iterator[str]:
        release = ptxas.release(compiler)
        if said := row.get("failed"):
            yield f"FAILED {name}: {said}"
        for kernel in row.get("ptx", ()):
            key = f"{kernel} {release}"
            if key in self.refused:
                yield f"FAILED {name}, ptxas {release}: {self.refused[key]}"
                continue
            made = self.state.kernels[key]
            for said in (*made.spilling, *made.serialized, *made.hazards):
                yield f"FAILED {name}, ptxas {release}: {kernel}: {said}"


if __name__ == "__main__":
    from tests.support.kernels import deviceless  # what the cases' processes import, and not a second copy of it

    sys.exit(deviceless.main())
