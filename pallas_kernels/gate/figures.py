"""What the reports of the compilers say of one program: reading them, no judgement."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

INSTRUCTIONS = {
    "wgmma": re.compile(r"wgmma\.mma_async"),
    "mma": re.compile(r"\bmma\.sync"),
    "tma": re.compile(r"cp\.async\.bulk\.tensor"),
}
SHARED = re.compile(r"\b(?:ld\.shared|st\.shared|ldmatrix|stmatrix|shfl)\.")
NARROW = re.compile(r"\bld\.shared[\w.:]*\.[bsu](?:8|16)\b")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALISED = re.compile(r"Potential Performance Loss: (.*)")
SMEM = re.compile(r"dynamic_shared_memory_size %c(\d+)")
THUNK = re.compile(r"^(\s*)\d+: (k\w+)", re.MULTILINE)
LOG_HEAD = 1 << 24  # the launch stands near the head of a log of tens of megabytes


@dataclass(frozen=True)
class Figures:
    """One compiled program. Kernels are those of Mosaic GPU; of several the largest figure counts."""

    seconds: float = 0.0  # to lower and compile
    processor: float = 0.0  # seconds of processors it took
    kernels: int = 0  # compiled, not called
    registers: int = 0
    spills: int = 0  # bytes stored and loaded, and of stack frames
    smem: int = 0  # bytes per block
    serialised: tuple[str, ...] = ()  # ptxas on wgmma that waits for itself
    instructions: dict[str, int] = field(default_factory=dict)
    shared: int = 0  # instructions through shared memory, or from thread to thread by the same way
    narrow: int = 0  # loads from there of less than 4 bytes
    temp: int = 0  # bytes per device, as the next six
    arguments: int = 0
    code: int = 0  # of the whole program as it is kept, where the backend does not tell the code alone
    alias: int = 0
    memory: int = 0  # arguments, outputs and temporaries at once
    moved: int = 0  # bytes that a run reads and writes, see `traffic`
    donated: int = 0  # arguments given away
    aliased: int = 0  # arguments that an output lies on
    copies: tuple[str, ...] = ()  # of what may not be copied
    buffers: int | None = None  # command buffers: CUDA graphs that it is cut into
    loose: int = 0  # thunks outside of them


def kernels(folder: Path) -> dict[str, object]:
    """Fields of `Figures` from Mosaic's dump: one .ptxas, .ptx and pass log per kernel."""
    reports = [path.read_text() for path in sorted(folder.glob("*.ptxas"))]
    codes = [path.read_text() for path in sorted(folder.glob("*.ptx"))]
    sizes = []
    for path in folder.glob("*.mlir-passes.log"):
        with path.open() as log:
            sizes += [int(size) for size in SMEM.findall(log.read(LOG_HEAD))[:1]]
    return {
        "kernels": len(codes),
        "registers": max((int(n) for report in reports for n in REGISTERS.findall(report)), default=0),
        "spills": sum(int(n) for report in reports for found in SPILL.findall(report) for n in found),
        "smem": max(sizes, default=0),
        "serialised": tuple(line.strip() for report in reports for line in SERIALISED.findall(report)),
        "shared": sum(len(SHARED.findall(code)) for code in codes),
        "narrow": sum(len(NARROW.findall(code)) for code in codes),
        "instructions": {
            name: count
            for name, pattern in INSTRUCTIONS.items()
            if (count := sum(len(pattern.findall(code)) for code in codes))
        },
    }


def thunks(folder: Path) -> dict[str, object]:
    """Fields of `Figures` from XLA's last list of what it launches; empty where the backend writes none."""
    lists = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not lists:
        return {}
    found = THUNK.findall(lists[-1].read_text())
    return {
        "buffers": sum(kind == "kCommandBuffer" for _, kind in found),
        "loose": sum(not indent and kind != "kCommandBuffer" for indent, kind in found),
    }
