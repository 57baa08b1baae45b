"""The spilled registers that are known and explained; all others break a law of the gate."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Known(NamedTuple):
    """Spills of some programs under one release of ptxas."""

    names: str  # shell pattern of the programs' names
    ptxas: str  # release, such as "13.5.37"
    most: int  # bytes: stores, loads and stack frames, summed
    why: str


KNOWN = (
    Known(
        "prefill 8b shared bfloat16 page64 t2048",
        "13.5.37",
        20,
        "registers around the product of the weights in shared memory, a form that is chosen only for ptxas < 13.3",
    ),
    Known(
        "decode 70b-tp4 mma bfloat16 float8_e4m3fn page64 q1",
        "13.5.37",
        24,
        "two registers outside of the tile loop, stored and loaded once an item, with jax 0.11",
    ),
    # Programs of tests/gpu, to be mended in their kernels. All spill outside of what the gate's own cases cover.
    Known("decode: a window and a soft cap, dim 256", "13.5.37", 116, "at the limit of registers; to be mended"),
    Known("decode: a window and a soft cap, dim 256", "13.0.88", 116, "at the limit of registers; to be mended"),
    Known("prefill: a window and a soft cap, dim 256", "13.5.37", 72, "at the limit of 168 registers; to be mended"),
    Known("decode_8bit: float8_e4m3fn, dim 256, page 16", "13.5.37", 76, "at the limit of 255 registers; to be mended"),
    Known("decode_8bit: float8_e4m3fn, dim 256, page 16", "13.0.88", 76, "at the limit of 255 registers; to be mended"),
)


def allowed(name: str, ptxas: str) -> int:
    """Return the bytes that a program may spill under a release of ptxas."""
    return max((known.most for known in KNOWN if known.ptxas == ptxas and fnmatchcase(name, known.names)), default=0)
