"""Count the bytes that the kernels of a compiled module read and write, from its text.

Each launch counts all of its inputs and outputs: too much if it reads part of an array, too little
if it reads one twice, as our own kernels may. A conditional counts its largest branch; a loop of
unknown trip count counts one trip.
"""

from __future__ import annotations

import re

from pallas_kernels.gate.hlo import ARRAY, HARMLESS, Instruction, computations, size

FREE = HARMLESS - {"broadcast"} | {"after-all", "partition-id", "replica-id"}
CALLED = re.compile(r"\b(?:to_apply|calls|body|condition)=%([\w.\-]+)")
BRANCHES = re.compile(r"\b(?:(?:true|false)_computation=|branch_computations=\{)((?:%[\w.\-]+(?:, )?)+)")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def moved(text: str) -> int:
    """Return the bytes that one run of the module moves."""
    code, entry = computations(text)

    def of(name: str) -> int:
        body = code.get(name, [])
        known = {one.name: one for one in body}
        return sum(launched(one, known) for one in body if one.opcode not in FREE)

    def launched(one: Instruction, known: dict[str, Instruction]) -> int:
        if one.opcode == "conditional":
            branches = [name for found in BRANCHES.findall(one.told) for name in re.findall(r"%([\w.\-]+)", found)]
            return max(of(name) for name in branches)
        if one.opcode in ("while", "call", "async-start"):
            turns = TURNS.search(one.told)
            return (int(turns[1]) if turns else 1) * sum(of(name) for name in CALLED.findall(one.told))
        given = sum(_bytes(known[name]) for name in one.operands if name in known)
        return given + _bytes(one)

    return of(entry)


def _bytes(one: Instruction) -> int:
    """Return the bytes of an instruction's value; for a tuple, of all its arrays."""
    return sum(size((kind, tuple(int(n) for n in dims.split(",") if n))) for kind, dims in ARRAY.findall(one.shape))
