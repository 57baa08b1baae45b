"""The rules that the gate checks a compiled program against: fixed ones, and recorded bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pallas_kernels.gate.cases import Compilable
from pallas_kernels.gate.figures import Figures
from pallas_kernels.gate.targets import GB

SMEM = 227 * 1024  # bytes available to a block on sm_90
ROOM = 16  # temporaries may exceed the recorded ones by 1/ROOM, because buffer packing varies a little


@dataclass(frozen=True)
class Bound:
    """The figures of a case recorded under one version of jax, named as in `Figures`."""

    registers: int
    temp: int  # bytes
    buffers: int | None = None
    kernels: int = 0
    shared: int | None = None
    narrow: int | None = None
    launches: int | None = None
    moved: int | None = None


# A figure's name in messages, and what its message adds.
RECORDED = {
    "registers": ("registers", ""),
    "temp": ("bytes of temporaries", f" plus 1/{ROOM} of that"),
    "buffers": ("command buffers", ""),
    "kernels": ("kernels compiled", ": is one traced per layer?"),
    "shared": ("instructions through shared memory", ""),
    "narrow": ("loads of shared memory of less than 4 bytes", ""),
    "launches": ("launches", ""),
    "moved": ("bytes read and written", ""),
}


def bound_of(figures: Figures) -> Bound:
    return Bound(**{name: getattr(figures, name) for name in RECORDED})


def laws(case: Compilable, figures: Figures, memory: int) -> Iterator[str]:
    """Yield each breach of the fixed rules, with its figure and bound. `memory`: bytes of a device."""
    yield from figures.spilling
    for said in figures.serialized:
        yield f"wgmma is serialized, the bound is 0 places: {said}"
    yield from figures.hazards
    if figures.instructions.get("wgmma") and figures.disassembled < figures.kernels:
        yield f"{figures.disassembled} of {figures.kernels} kernels disassembled: no nvdisasm in the folder of ptxas"
    for name in sorted(case.needs):
        if not figures.instructions.get(name):
            have = ", ".join(f"{count} {other}" for other, count in figures.instructions.items()) or "none"
            yield f"0 {name} instructions, the bound is at least 1 (matrix and TMA instructions found: {have})"
    if figures.coarse:
        yield f"{figures.coarse} tanh.approx instructions of 11 bits, the bound is 0"
    if figures.smem > SMEM:
        yield f"{figures.smem} bytes of shared memory, the bound is {SMEM}"
    if figures.aliased < figures.donated:
        yield f"{figures.aliased} of {figures.donated} donated arguments changed in place, the bound is all of them"
    if case.most_temp is not None and figures.temp > case.most_temp:
        yield f"{figures.temp} bytes of temporaries in an operation in place, the bound is {case.most_temp}"
    for said in figures.copies:
        yield f"a weight or a pool is copied, the bound is 0 copies: {said}"
    if case.command_buffers is not None and figures.buffers != case.command_buffers:
        yield f"{figures.buffers} command buffers, the bound is {case.command_buffers}"
    if case.most_moved is not None and figures.moved > case.most_moved:
        yield f"{figures.moved / GB:.3f} GB read and written, the bound is {case.most_moved / GB:.3f} GB"
    if figures.memory > memory:
        yield f"{figures.memory / GB:.2f} GB per device, the bound is {memory / GB:.0f} GB"


def excess(figures: Figures, bound: Bound | None) -> Iterator[str]:
    """Yield each figure that exceeds its recorded bound."""
    if bound is None:
        yield "no bound is recorded for this case: check its figures, then run with --record"
        return
    for name, (what, more) in RECORDED.items():
        figure, most = getattr(figures, name), getattr(bound, name)
        room = bound.temp // ROOM if name == "temp" else 0
        if figure is not None and most is not None and figure > most + room:
            yield f"{figure} {what}, the recorded bound is {most}{more}"
