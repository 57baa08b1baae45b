"""Count the launches of a compiled module and the bytes that they read and write, from its text.

Each launch counts all of its inputs and outputs: too much if it reads part of an array, too little
if it reads one twice, as our own kernels may. Of an argument that a kernel changes in place, as the
KV write changes a pool, only as many bytes count as the kernel has other inputs; and kernels that
read it before it changes again count it once together, as decode and prefill attention read the
pages of different rows. A conditional counts its largest branch; a loop of unknown trip count
counts one trip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from pallas_kernels.gate.hlo import ARRAY, HARMLESS, RENAMES, Instruction, computations, in_place, size

FREE = HARMLESS - {"broadcast"} | {"after-all", "partition-id", "replica-id"}
CALLED = re.compile(r"\b(?:to_apply|calls|body|condition)=%([\w.\-]+)")
BRANCHES = re.compile(r"\b(?:(?:true|false)_computation=|branch_computations=\{)((?:%[\w.\-]+(?:, )?)+)")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
LAYER = "/jit(layer)/"  # in the op_name of what a layer of a model computes
INDEX = re.compile(r"index=(\d+)")


class Traffic(NamedTuple):
    """What one run of a module does."""

    moved: int = 0  # bytes read and written
    launches: int = 0
    layered: int = 0  # launches in layers of a model


class Pool(NamedTuple):
    """An argument of the program, possibly changed in place."""

    argument: str
    changed: str  # the last instruction that changed it; "": none


def traffic(text: str) -> Traffic:
    """Return the launches of one run of the module, and the bytes that they move."""
    code, entry = computations(text)

    def of(name: str) -> Traffic:
        body = code.get(name, [])
        known, shared = {instruction.name: instruction for instruction in body}, set[Pool]()
        return _sum(launched(instruction, known, shared) for instruction in body if instruction.opcode not in FREE)

    def launched(instruction: Instruction, known: dict[str, Instruction], shared: set[Pool]) -> Traffic:
        if instruction.opcode == "conditional":
            branches = [
                name for match in BRANCHES.findall(instruction.attributes) for name in re.findall(r"%([\w.\-]+)", match)
            ]
            return Traffic(*map(max, zip(*map(of, branches), strict=True)))
        if instruction.opcode in ("while", "call", "async-start"):
            turns = TURNS.search(instruction.attributes)
            return _sum([of(name) for name in CALLED.findall(instruction.attributes)] * (int(turns[1]) if turns else 1))
        return Traffic(_moved(instruction, known, shared), 1, int(LAYER in instruction.attributes))

    return of(entry)


def _sum(each: Iterable[Traffic]) -> Traffic:
    return Traffic(*map(sum, zip(Traffic(), *each, strict=True)))


def _moved(instruction: Instruction, known: dict[str, Instruction], shared: set[Pool]) -> int:
    """Return the bytes that one launch reads and writes; `shared` holds the pools that others have read."""
    pools = [_pool(name, known) for name in instruction.operands]
    held = {out: at for out, at in in_place(instruction).items() if pools[at] is not None}
    given = 0
    for at, (name, pool) in enumerate(zip(instruction.operands, pools, strict=True)):
        if name in known and at not in held.values() and pool not in shared:
            given += _bytes(known[name])
            if pool is not None and pool.changed:
                shared.add(pool)
    arrays = _arrays(instruction)
    changed = sum(arrays[out] for out in held)
    return given + min(changed, given) + sum(arrays) - changed


def _pool(name: str, known: dict[str, Instruction]) -> Pool | None:
    """Return which argument of the program a value is, if it is one, possibly changed in place."""
    instruction, changed = known.get(name), ""
    while instruction is not None and instruction.opcode != "parameter":
        if instruction.opcode not in RENAMES:
            return None
        source, index = known.get(instruction.operands[0]), INDEX.search(instruction.attributes)
        if source is not None and index is not None and source.opcode == "custom-call":
            at = in_place(source).get(int(index[1]))
            changed = changed or source.name
            source = None if at is None else known.get(source.operands[at])
        instruction = source
    return None if instruction is None else Pool(instruction.name, changed)


def _bytes(instruction: Instruction) -> int:
    """Return the bytes of an instruction's value; for a tuple, of all its arrays."""
    return sum(_arrays(instruction))


def _arrays(instruction: Instruction) -> list[int]:
    return [
        size((kind, tuple(int(n) for n in dims.split(",") if n))) for kind, dims in ARRAY.findall(instruction.shape)
    ]
