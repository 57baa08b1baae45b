"""Compile each case in its own process, forked from one that has imported jax but not initialized it.

Cases need separate processes because Mosaic writes no report for a kernel already compiled in the
process, XLA reads its flags once, and a compiler that aborts kills its process. They are forked
because importing takes longer than most cases.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pallas_kernels.gate import figures, hlo, traffic
from pallas_kernels.gate.cases import Compilable, mesh_of
from pallas_kernels.gate.figures import Figures
from pallas_kernels.gate.targets import Target, dump_into

Outcome = Any  # what the work returns, such as figures; a string: why it did not compile
Work = Callable[[Any, Target], Outcome]


class Named(Protocol):
    """What can be compiled, by a name."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


@dataclass(frozen=True)
class _Running(Generic[C]):
    case: C
    process: BaseProcess
    pipe: Connection
    ends: float
    limit: float
    said: Path  # log of its output and its compilers'


def compile_all(
    cases: Sequence[C],
    target: Target,
    *,
    jobs: int,
    tell: Callable[[C, Outcome], None],
    limit: float,
    work: Work | None = None,
) -> None:
    """Compile `cases`, `jobs` at a time, with `limit` seconds each; call `tell` as each one finishes.

    `work` is what a child does with a case, `compile_case` by default.
    """
    todo = list(reversed(cases))
    running: list[_Running[C]] = []
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        while todo or running:
            while todo and len(running) < jobs:
                running.append(_begin(todo.pop(), target, Path(folder), limit, work or compile_case))
            ready = wait([child.pipe for child in running], timeout=1.0)
            for child in list(running):
                late = time.monotonic() > child.ends
                if child.pipe in ready or late:
                    running.remove(child)
                    tell(child.case, _end(child, late=late and child.pipe not in ready))


def _begin(case: C, target: Target, folder: Path, limit: float, work: Work) -> _Running[C]:
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    said = folder / f"said-{time.monotonic_ns()}"
    process = context.Process(target=_child, args=(case, target, sender, said, work), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns about forking with threads; it has none before it is initialized
        process.start()
    sender.close()
    return _Running(case, process, receiver, time.monotonic() + limit, limit, said)


def _end(running: _Running[C], late: bool) -> Outcome:
    outcome: Outcome
    if late:
        running.process.kill()
        outcome = f"did not finish within {running.limit:.0f} s"
    else:
        try:
            outcome = running.pipe.recv()
        except EOFError:
            running.process.join()
            outcome = f"the compiler died (exit code {running.process.exitcode}): {_tail(running.said)}"
    running.process.join()
    running.pipe.close()
    return outcome


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return " | ".join(line.strip() for line in lines[-8:] if line.strip())


def _child(case: Named, target: Target, sender: Connection, said: Path, work: Work) -> None:
    with said.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        outcome: Outcome = work(case, target)
    except Exception as error:  # whatever a kernel or a compiler raises is reported
        traceback.print_exc()
        outcome = f"does not compile: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
    sender.send(outcome)
    sender.close()


def compile_case(case: Compilable, target: Target) -> Figures:
    """Compile a case in this process, which must not have compiled anything before."""
    import jax

    with tempfile.TemporaryDirectory(prefix="aot-case-") as scratch:
        xla, mosaic = Path(scratch) / "xla", Path(scratch) / "mosaic"
        xla.mkdir()
        mosaic.mkdir()
        dump_into(xla, target, case.flags)
        mesh = mesh_of(target.devices()[: case.devices])
        began = time.perf_counter()
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = case.lower(mesh)
            with _mosaic_dump(mosaic):
                compiled = lowered.compile()
        seconds, spent = time.perf_counter() - began, os.times()
        memory, text = compiled.memory_analysis(), compiled.as_text() or ""
        if memory is None:
            raise RuntimeError("this backend does not report the memory of a program")
        program = compiled.runtime_executable()
        donated = sum(bool(info.donated) for info in jax.tree.leaves(lowered.args_info))
        used = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return Figures(
            seconds=seconds,
            processor=sum(spent[:4]),  # all of this process's time: it runs only this case, and waits for its compilers
            temp=memory.temp_size_in_bytes,
            arguments=memory.argument_size_in_bytes,
            code=memory.generated_code_size_in_bytes or len(program.serialize() if program else b""),
            alias=memory.alias_size_in_bytes,
            memory=used + memory.temp_size_in_bytes,
            floor=used,
            layers=case.layers,
            donated=donated,
            aliased=hlo.aliased(text),
            copies=tuple(hlo.copies(text, case.held)),
            **figures.kernels(mosaic),  # type: ignore[arg-type]
            **figures.thunks(xla),  # type: ignore[arg-type]
            **traffic.traffic(text)._asdict(),
        )


@contextmanager
def _mosaic_dump(folder: Path) -> Iterator[None]:
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    try:
        yield
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]
