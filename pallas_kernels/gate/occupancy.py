"""Blocks per multiprocessor, and an estimate of the bytes that a kernel's copies have in flight.

Limits of compute capability 9.0 are those of the CUDA C++ Programming Guide, "Compute Capabilities".
The latency is an assumption: the time of a copy from memory under load.
"""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # of a multiprocessor
SHARED, RESERVED = 228 * 1024, 1024  # bytes of a multiprocessor, and those that each block takes besides its own
CORES = 132  # multiprocessors of an H100 or H200 SXM
LATENCY = 1e-6  # seconds, assumed


@dataclass(frozen=True)
class Launched:
    """What one kernel takes of a multiprocessor."""

    name: str
    registers: int  # per thread, at launch
    threads: int  # per block
    shared: int  # bytes per block
    copies: bool  # whether TMA fills its shared memory
    loop: int = 0  # instructions of its inner loop; see sass.inner_loop

    @property
    def blocks(self) -> int:
        """The most blocks per multiprocessor."""
        allocated = -(-self.registers // 8) * 8 * -(-self.threads // 32) * 32  # in units of 256 per warp
        return min(REGISTERS // max(allocated, 1), SHARED // (self.shared + RESERVED), THREADS // self.threads, BLOCKS)

    @property
    def in_flight(self) -> int:
        """The most bytes that its copies have in flight per multiprocessor: all its shared memory."""
        return self.blocks * self.shared if self.copies else 0

    @property
    def cycles(self) -> float:
        """The fewest cycles of the inner loop, if all warps of the blocks run it: four issue per cycle."""
        return self.loop * self.blocks * -(-self.threads // 32) / 4

    def share(self, bandwidth: float) -> float:
        """Return the most of a memory bandwidth (bytes/s) that its copies can use, by Little's law."""
        return min(1.0, self.in_flight * CORES / LATENCY / bandwidth)
