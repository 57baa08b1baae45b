"""Read a compiled module's text: which instructions copy large arguments, and which outputs alias arguments.

A copy is an instruction (or a fusion of instructions) that only moves data, as large as a held
argument: a weight, recognized by following the entry's parameters, or a pool, recognized by its
shape, because each layer updates it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
LINE = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
CALLS = re.compile(r"calls=%([\w.\-]+)")
ALIAS = re.compile(r"\{[\d,\s]*\}: \((\d+), \{[\d,\s]*\}")
IN_PLACE = re.compile(r"output_to_operand_aliasing=\{((?:\{\d*\}: \(\d+, \{\}\)(?:, )?)+)\}")

RENAMES = {"bitcast", "get-tuple-element", "opt-barrier", "copy-done", "async-done"}
MOVES = {"copy", "copy-start", "transpose", "convert", "concatenate", "pad", "reverse", "reshape"}
MOVES |= {"all-gather", "all-gather-start", "all-to-all", "collective-permute", "collective-permute-start"}
WRAPPERS = {"fusion", "async-start"}  # their work is in a computation of its own
HARMLESS = RENAMES | {"parameter", "constant", "tuple", "broadcast"}
BITS = {"pred": 8, "bf16": 16, "s4": 4, "u4": 4}
Array = tuple[str, tuple[int, ...]]  # dtype and dimensions


@dataclass(frozen=True)
class Instruction:
    """One instruction of a module's text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str  # the text after its operands

    @property
    def calls(self) -> str | None:
        """The computation that a wrapper calls."""
        match = CALLS.search(self.attributes)
        return match[1] if match else None

    @property
    def array(self) -> Array | None:
        """The dtype and dimensions of its value; for a tuple, of the first array."""
        match = ARRAY.search(self.shape)
        return None if match is None else (match[1], tuple(int(size) for size in match[2].split(",") if size))


def size(array: Array) -> int:
    """Return the bytes of an array."""
    kind, dims = array
    digits = re.search(r"\d+", kind)
    bits = BITS.get(kind) or (int(digits[0]) if digits else 8)
    return prod(dims) * bits // 8


def _instruction(line: str) -> Instruction | None:
    parts = LINE.match(line)
    if parts is None:
        return None
    name, shape, opcode, rest = parts.groups()
    given, _, rest = rest.partition(")")
    return Instruction(name, shape, opcode, tuple(re.findall(r"%([\w.\-]+)", given)), rest)


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of every computation by name, and the name of the entry."""
    code: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = HEAD.match(line) if not line.startswith(" ") else None
        if head is not None:
            current = code.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None and (instruction := _instruction(line)) is not None:
            current.append(instruction)
    return code, entry


def copies(text: str, held: int) -> list[str]:
    """Describe each instruction that copies an argument of more than `held` bytes."""
    code, entry = computations(text)
    parameters = [instruction.array for instruction in code[entry] if instruction.opcode == "parameter"]
    large = {array for array in parameters if array is not None and size(array) > held}
    inside = {instruction.calls for body in code.values() for instruction in body if instruction.opcode in WRAPPERS}
    bodies = {name: body for name, body in code.items() if name not in inside}
    return [copy for name, body in bodies.items() for copy in _copies(body, code, large, held, name == entry)]


def _copies(
    body: list[Instruction], code: dict[str, list[Instruction]], large: set[Array], held: int, top: bool
) -> Iterator[str]:
    known: dict[str, Instruction] = {}
    weights: set[str] = set()
    for instruction in body:
        known[instruction.name] = instruction
        if top and instruction.opcode == "parameter" and instruction.array in large:
            weights.add(instruction.name)
        if instruction.opcode in RENAMES and weights.intersection(instruction.operands):
            weights.add(instruction.name)
        array = instruction.array
        if array is None or size(array) <= held or not _moves(instruction, code) or "S(1)" in instruction.shape:
            continue  # S(1): a TPU prefetches a weight into fast memory, which is no copy
        if any(name in weights or (name in known and known[name].array in large) for name in instruction.operands):
            yield f"{instruction.opcode} {instruction.name} of {array[0]}{list(array[1])}, {size(array) / 1e9:.2f} GB"


def _moves(instruction: Instruction, code: dict[str, list[Instruction]]) -> bool:
    """Return whether an instruction only moves data."""
    if instruction.opcode in WRAPPERS and instruction.calls in code:
        inner = {each.opcode for each in code[instruction.calls]}
        return inner <= MOVES | HARMLESS and bool(inner & MOVES)
    return instruction.opcode in MOVES


def aliased(text: str) -> int:
    """Return the number of arguments that alias an output."""
    head = text.split("\n", 1)[0]
    begin = head.find("input_output_alias={")
    if begin < 0:
        return 0
    end = head.find(" }", begin)
    return len({match[1] for match in ALIAS.finditer(head[begin:end])})


def in_place(call: Instruction) -> dict[int, int]:
    """Return the operand that each output of a custom call changes in place, by the number of the output."""
    aliases = IN_PLACE.search(call.attributes)
    pairs = re.findall(r"\{(\d*)\}: \((\d+)", aliases[1]) if aliases else []
    return {int(out or 0): int(at) for out, at in pairs}
