"""Parse the compilers' reports of one program into figures, without judging them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from pallas_kernels.gate import sass
from pallas_kernels.gate.occupancy import Launched

INSTRUCTIONS = {
    "wgmma": re.compile(r"wgmma\.mma_async"),
    "mma": re.compile(r"\bmma\.sync"),
    "tma": re.compile(r"cp\.async\.bulk\.tensor"),
    "atom": re.compile(r"atom\.acq_rel\.gpu"),
}
SHARED = re.compile(r"\b(?:ld\.shared|st\.shared|ldmatrix|stmatrix|shfl)\.")
NARROW = re.compile(r"\bld\.shared[\w.:]*\.[bsu](?:8|16)\b")
COARSE = re.compile(r"\btanh\.approx")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALISED = re.compile(r"Potential Performance Loss: (.*)")
SMEM = re.compile(r"dynamic_shared_memory_size %c(\d+)")
THREADS = re.compile(r"\.maxntid ([\d, ]+)")
LOADS = re.compile(r"cp\.async\.bulk[\w.]*\.shared::cluster\.global")
THUNK = re.compile(r"^(\s*)\d+: (k\w+)", re.MULTILINE)
PARKED = 128  # bytes: stores, loads and stack frames that a kernel may have for values that its loop only reads
LOG_HEAD = 1 << 24  # bytes of the log to read: the launch is near its head, and logs reach tens of megabytes


@dataclass(frozen=True)
class Figures:
    """The figures of one compiled program; for several Mosaic GPU kernels, the maximum unless said otherwise."""

    seconds: float = 0.0  # seconds to lower and compile
    processor: float = 0.0  # CPU seconds
    kernels: int = 0  # number compiled, not of calls
    registers: int = 0
    spills: int = 0  # bytes spilled: stores, loads and stack frames, summed
    spilling: tuple[str, ...] = ()  # spills that cost time; see `spilling`
    smem: int = 0  # bytes per block
    serialized: tuple[str, ...] = ()  # ptxas warnings about serialized wgmma
    instructions: dict[str, int] = field(default_factory=dict)
    shared: int = 0  # instructions that go through shared memory, or exchange between threads over the same path
    narrow: int = 0  # loads from shared memory of less than 4 bytes
    coarse: int = 0  # `tanh.approx`, which has only 11 bits of precision
    disassembled: int = 0  # number of kernels whose machine code was read
    hazards: tuple[str, ...] = ()  # writes to registers of wgmma in flight
    largest: Launched | None = None  # the kernel of most shared memory
    temp: int = 0  # bytes per device; also the next six
    arguments: int = 0
    code: int = 0  # machine code, or the whole serialized program if the backend does not report its code
    alias: int = 0
    memory: int = 0  # arguments, outputs and temporaries at once
    moved: int = 0  # bytes read and written in a run; see `traffic`
    floor: int = 0  # bytes that a run must move: each argument read once, each output written once
    launches: int = 0  # kernels and copies launched in a run
    layered: int = 0  # of them, those of a model's layers
    layers: int = 0  # of the model
    donated: int = 0  # number of donated arguments
    aliased: int = 0  # number of arguments that alias an output
    copies: tuple[str, ...] = ()  # copies of pools and weights
    buffers: int | None = None  # command buffers: the CUDA graphs it is cut into
    loose: int = 0  # thunks outside command buffers

    @property
    def per_layer(self) -> float | None:
        """Launches per layer of a model; None if the program is no step."""
        return self.layered / self.layers if self.layers else None


def assembled(reports: Sequence[str]) -> dict[str, object]:
    """Return the fields of `Figures` in reports of ptxas."""
    return {
        "registers": max((int(n) for report in reports for n in REGISTERS.findall(report)), default=0),
        "spills": sum(int(n) for report in reports for sizes in SPILL.findall(report) for n in sizes),
        "serialized": tuple(line.strip() for report in reports for line in SERIALISED.findall(report)),
    }


def spilling(report: str, machine: str) -> Iterator[str]:
    """Describe the spills of a kernel that cost time, from ptxas's report and its machine code ("" if not read).

    ptxas parks a few values that a loop over tiles does not change, where that fills the registers.
    That costs next to nothing; a kernel without such a loop has no reason to.
    """
    spilled = sum(int(n) for sizes in SPILL.findall(report) for n in sizes)
    most = PARKED if sass.inner_loop(machine) else 0
    if spilled > most:
        yield f"{spilled} bytes of registers spilled, the bound is {most}"
    if spilled:
        yield from sass.spilling(machine)


def kernels(folder: Path) -> dict[str, object]:
    """Return the fields of `Figures` in Mosaic's dump: one .ptxas, .ptx, .sass_ctrl and pass log per kernel."""
    reports = {path: path.read_text() for path in sorted(folder.glob("*.ptxas"))}
    codes = {path: path.read_text() for path in sorted(folder.glob("*.ptx"))}
    # There is machine code if jax finds nvdisasm.
    machine = {path.with_suffix(".ptxas"): path.read_text() for path in sorted(folder.glob("*.sass_ctrl"))}
    launches = [_launched(path, code) for path, code in codes.items()]
    return {
        "kernels": len(codes),
        "largest": max(
            filter(None, launches), key=lambda launched: (launched.shared, launched.registers), default=None
        ),
        "disassembled": len(machine),
        "hazards": tuple(said for code in machine.values() for said in sass.hazards(code)),
        "spilling": tuple(said for path, text in reports.items() for said in spilling(text, machine.get(path, ""))),
        "smem": max((_shared(path) for path in folder.glob("*.mlir-passes.log")), default=0),
        **assembled(list(reports.values())),
        "shared": sum(len(SHARED.findall(code)) for code in codes.values()),
        "narrow": sum(len(NARROW.findall(code)) for code in codes.values()),
        "coarse": sum(len(COARSE.findall(code)) for code in codes.values()),
        "instructions": {
            name: count
            for name, pattern in INSTRUCTIONS.items()
            if (count := sum(len(pattern.findall(code)) for code in codes.values()))
        },
    }


def _shared(log: Path) -> int:
    """Return the bytes of shared memory that a pass log launches a kernel with."""
    with log.open() as file:
        return next((int(size) for size in SMEM.findall(file.read(LOG_HEAD))), 0)


def _launched(ptx: Path, code: str) -> Launched | None:
    """Return what a kernel takes of a multiprocessor; None without the report of ptxas or the launch."""
    report, log, machine = (ptx.with_suffix(end) for end in (".ptxas", ".mlir-passes.log", ".sass_ctrl"))
    threads = THREADS.search(code)
    if threads is None or not report.exists() or not log.exists():
        return None
    registers = assembled([report.read_text()])["registers"]
    loop = sass.inner_loop(machine.read_text()) if machine.exists() else 0
    copies = bool(LOADS.search(code))
    return Launched(ptx.stem, int(str(registers)), prod(map(int, threads[1].split(","))), _shared(log), copies, loop)


def thunks(folder: Path) -> dict[str, object]:
    """Return the fields of `Figures` in XLA's final thunk list; empty if the backend writes none."""
    lists = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not lists:
        return {}
    kinds = THUNK.findall(lists[-1].read_text())
    return {
        "buffers": sum(kind == "kCommandBuffer" for _, kind in kinds),
        "loose": sum(not indent and kind != "kCommandBuffer" for indent, kind in kinds),
    }
