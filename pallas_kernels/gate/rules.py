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
    """The figures of a case recorded under one version of jax."""

    registers: int
    temp: int  # bytes
    buffers: int | None = None
    kernels: int = 0
    shared: int | None = None
    narrow: int | None = None
    launches: int | None = None
    moved: int | None = None


def bound_of(figures: Figures) -> Bound:
    return Bound(
        figures.registers,
        figures.temp,
        figures.buffers,
        figures.kernels,
        figures.shared,
        figures.narrow,
        figures.launches,
        figures.moved,
    )


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
    if figures.registers > bound.registers:
        yield f"{figures.registers} registers, the recorded bound is {bound.registers}"
    if figures.temp > bound.temp + bound.temp // ROOM:
        yield f"{figures.temp} bytes of temporaries, the recorded bound is {bound.temp} plus 1/{ROOM} of that"
    if figures.buffers is not None and bound.buffers is not None and figures.buffers > bound.buffers:
        yield f"{figures.buffers} command buffers, the recorded bound is {bound.buffers}"
    if figures.kernels > bound.kernels:
        yield f"{figures.kernels} kernels compiled, the recorded bound is {bound.kernels}: is one traced per layer?"
    if bound.shared is not None and figures.shared > bound.shared:
        yield f"{figures.shared} instructions through shared memory, the recorded bound is {bound.shared}"
    if bound.narrow is not None and figures.narrow > bound.narrow:
        yield f"{figures.narrow} loads of shared memory of less than 4 bytes, the recorded bound is {bound.narrow}"
    if bound.launches is not None and figures.launches > bound.launches:
        yield f"{figures.launches} launches, the recorded bound is {bound.launches}"
    if bound.moved is not None and figures.moved > bound.moved:
        yield f"{figures.moved} bytes read and written, the recorded bound is {bound.moved}"
