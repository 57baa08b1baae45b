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
        16,
        "one register around the product of the weights in shared memory, a form that is chosen only for ptxas < 13.3",
    ),
)


def allowed(name: str, ptxas: str) -> int:
    """Return the bytes that a program may spill under a release of ptxas."""
    return max((known.most for known in KNOWN if known.ptxas == ptxas and fnmatchcase(name, known.names)), default=0)
