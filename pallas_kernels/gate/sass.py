"""Find writes to registers of matrix products in flight, and costly spills, in disassembled machine code of Hopper.

An HGMMA runs asynchronously: it reads its left operand from registers, if that is there, and adds to
its accumulator until `WARPGROUP.DEPBAR.LE gsb0, N` waits for all but the N newest groups. A group
ends with the product that has the operand `gsb0`. Whatever writes these registers before is a race
that ptxas before 13.3 is known to generate. Products may follow each other on the same registers.

The products that may be in flight are propagated over all paths, as in any forward dataflow analysis,
so paths that no thread takes may raise false alarms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*)")
LABEL = re.compile(r"^\s*(\.L_\w+):")
SECTION = re.compile(r"^\s*\.section\s+(\.\S+?),")
TARGET = re.compile(r"`\((\.L_\w+)\)")
PRODUCT = re.compile(r"^[A-Z]GMMA\.64x(\d+)x\d+\.(\w+)")
REGISTER = re.compile(r"^R(\d+)(?:\.reuse)?$")
PREDICATE = re.compile(r"^!?U?P(?:\d|T)$")
PREDICATE_FIRST = {"ATOM", "ATOMG", "ATOMS", "LOP3", "SHFL", "VOTE"}  # those that then write a register
READS_FIRST = {"BAR", "WARPSYNC"}
FEW = 200  # instructions of a loop for each load of a spilled register
OLDEST = 8  # groups in flight that are told apart; older ones count as this old


class Instruction(NamedTuple):
    """An instruction: its predicate or "", its name with suffixes, and its operands."""

    predicate: str
    name: str
    operands: tuple[str, ...]

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.predicate} {self.name} {', '.join(self.operands)}".strip()


@dataclass(frozen=True)
class Function:
    """The instructions of one function, and where its labels point."""

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, int]

    def successors(self) -> list[set[int]]:
        """Return where control may go after each instruction. Raises ValueError for indirect jumps."""
        after_calls = {at + 1 for at, instruction in enumerate(self.code) if instruction.root == "CALL"}
        joins: dict[str, set[tuple[int, int]]] = {}
        for at, instruction in enumerate(self.code):
            if instruction.root == "BSSY":
                joins.setdefault(_barrier(instruction), set()).update(
                    (at, target) for target in self._targets(instruction)
                )
        targets = [self._after(at, instruction, after_calls, joins) for at, instruction in enumerate(self.code)]
        return [{at for at in each if at < len(self.code)} for each in targets]

    def _after(
        self, at: int, instruction: Instruction, after_calls: set[int], joins: dict[str, set[tuple[int, int]]]
    ) -> set[int]:  # fmt: skip
        conditional = {at + 1} if instruction.predicate else set()
        match instruction.root:
            case "BRA" | "JMP":
                some = any(PREDICATE.match(each) for each in instruction.operands) or "DIV" in instruction.name.split(
                    "."
                )
                return self._targets(instruction) | ({at + 1} if some else conditional)
            case "CALL":
                return self._targets(instruction) | {at + 1}
            case "RET":
                return after_calls | conditional
            case "EXIT" | "KILL":
                return conditional
            case "BSYNC" | "BREAK":
                # To where the threads meet: of the regions of this barrier, those around it if there are any.
                mine = joins.get(_barrier(instruction), set())
                around = {(begin, end) for begin, end in mine if begin < at <= end}
                return {at + 1} | {end for _, end in around or mine}
            case "BRX" | "JMX" | "BRXU" | "JMXU":
                raise ValueError(f"{instruction} of {self.name} jumps where only a register says")
        return {at + 1}

    def _targets(self, instruction: Instruction) -> set[int]:
        named = TARGET.search(", ".join(instruction.operands))
        if named is None or named[1] not in self.labels:
            raise ValueError(f"{instruction} of {self.name} names no label of it")
        return {self.labels[named[1]]}


def _barrier(instruction: Instruction) -> str:
    return next((each for each in instruction.operands if re.match(r"^B\d+$", each)), "")


def functions(text: str) -> list[Function]:
    """Parse the output of nvdisasm, with or without control codes."""
    parsed: list[Function] = []
    name, code, labels = "", list[Instruction](), dict[str, int]()
    for line in [*text.splitlines(), "\t.section .text.,"]:
        if (section := SECTION.match(line)) is not None:
            if code:
                parsed.append(Function(name, tuple(code), labels))
            name, code, labels = section[1].removeprefix(".text."), [], {}
        elif (label := LABEL.match(line)) is not None:
            labels[label[1]] = len(code)
        elif (instruction := LINE.search(line)) is not None:
            operands = tuple(part.strip() for part in instruction[3].split(",") if part.strip())
            code.append(Instruction(instruction[1] or "", instruction[2], operands))
    return parsed


def written(instruction: Instruction) -> range:
    """Return the registers that an instruction writes, other than a product in flight."""
    operands = list(instruction.operands)
    if instruction.root in READS_FIRST or not operands:
        return range(0)
    if instruction.root in PREDICATE_FIRST:
        while operands and PREDICATE.match(operands[0]):
            operands.pop(0)
    register = REGISTER.match(operands[0]) if operands else None
    if register is None:
        return range(0)
    first, suffixes = int(register[1]), instruction.name.split(".")[1:]
    if instruction.root == "LDSM":
        return range(first, first + (int(suffixes[-1]) if suffixes[-1] in ("2", "4") else 1))
    if "128" in suffixes or instruction.root in ("HMMA", "IMMA", "QMMA"):
        return range(first, first + 4)
    wide = (instruction.root == "CS2R" and "32" not in suffixes) or {"64", "WIDE", "F64"} & set(suffixes)
    return range(first, first + (2 if wide or instruction.root.startswith("D") else 1))


def in_flight(instruction: Instruction) -> tuple[range, range]:
    """Return the accumulator and the registers of the left operand of a product."""
    shape = PRODUCT.match(instruction.name)
    assert shape is not None
    count = int(shape[1]) // (4 if shape[2] == "F16" else 2)
    result, left = (REGISTER.match(operand) for operand in instruction.operands[:2])
    return (
        range(int(result[1]), int(result[1]) + count) if result else range(0),
        range(int(left[1]), int(left[1]) + 4) if left else range(0),
    )


Flying = frozenset[tuple[int, int]]  # (a product, the number of groups that ended since it began)


def _through(at: int, instruction: Instruction, flying: Flying) -> Flying:
    """Return the products that may be in flight after an instruction."""
    if PRODUCT.match(instruction.name):
        flying = flying | {(at, 0)}
        if "gsb0" in instruction.operands:
            flying = frozenset((each, min(age + 1, OLDEST)) for each, age in flying)
    elif (
        instruction.name.startswith("WARPGROUP.DEPBAR") and "gsb0" in instruction.operands and not instruction.predicate
    ):
        newest = int(instruction.operands[-1], 16)
        flying = frozenset((each, age) for each, age in flying if age <= newest)
    return flying


def hazards(text: str) -> list[str]:
    """Describe each write to a register of a product that may be in flight. Raises ValueError as `successors` does."""
    return [said for function in functions(text) for said in _hazards(function)]


def _hazards(function: Function) -> Iterator[str]:
    products = {
        at: frozenset().union(*in_flight(instruction))
        for at, instruction in enumerate(function.code)
        if PRODUCT.match(instruction.name)
    }
    if not products:
        return
    before = _before(function)
    for at, instruction in enumerate(function.code):
        targets = set(written(instruction)) if at not in products and before[at] else set()
        hit = [each for each, _ in sorted(before[at]) if not targets.isdisjoint(products[each])]
        if hit:
            yield f"{function.name}: {instruction} writes a register of {function.code[hit[0]]} in flight"


def _before(function: Function) -> list[Flying]:
    """Return the products that may be in flight before each instruction."""
    successors = function.successors()
    before: list[Flying] = [frozenset()] * len(function.code)
    todo = list(range(len(function.code)))[::-1]  # each once, in order, and again whatever changes
    while todo:
        at = todo.pop()
        after = _through(at, function.code[at], before[at])
        for successor in successors[at]:
            if not after <= before[successor]:
                before[successor] |= after
                todo.append(successor)
    return before


def inner_loop(text: str) -> int:
    """Return the instructions of the longest loop with matrix products that has no such loop inside; 0 if none has."""
    return max(map(len, _inner_loops(text)), default=0)


def spilling(text: str) -> Iterator[str]:
    """Describe each inner loop with matrix products that stores spilled registers, or loads more than a few.

    Values that do not change may be stored before the loop and loaded in it: up to one instruction of FEW.
    """
    for loop in _inner_loops(text):
        stores, loads = (sum(instruction.root == name for instruction in loop) for name in ("STL", "LDL"))
        if stores:
            yield f"{stores} stores of spilled registers in a loop with matrix products, the bound is 0"
        if loads * FEW > len(loop):
            yield f"{loads} loads of spilled registers in a loop of {len(loop)} instructions, the bound is 1/{FEW}"


def _inner_loops(text: str) -> Iterator[list[Instruction]]:
    """Yield the instructions of each loop with matrix products that has no such loop inside."""
    for function in functions(text):
        products = {
            at
            for at, instruction in enumerate(function.code)
            if PRODUCT.match(instruction.name) or instruction.root == "HMMA"
        }
        loops = [body for body in _loops(function) if products & body] if products else []
        for body in loops:
            if not any(other < body for other in loops):
                yield [function.code[at] for at in sorted(body)]


def _loops(function: Function) -> list[set[int]]:
    """Return the instructions of each loop: those that reach a jump back to its head without passing the head."""
    successors = function.successors()
    before: list[set[int]] = [set() for _ in successors]
    reached, todo = {0}, [0]
    while todo:
        at = todo.pop()
        for successor in successors[at]:
            before[successor].add(at)
        todo += successors[at] - reached
        reached |= successors[at]
    bodies: dict[int, set[int]] = {}
    for end, head in _jumps_back(successors):
        body, todo = bodies.setdefault(head, {head}), [end]
        while todo:
            at = todo.pop()
            todo += before[at] if at not in body else ()
            body.add(at)
    return list(bodies.values())


def _jumps_back(successors: list[set[int]]) -> Iterator[tuple[int, int]]:
    """Yield the edges to an instruction on the path that a depth-first search is on."""
    on_path, seen, path = {0}, {0}, [(0, iter(sorted(successors[0])))]
    while path:
        at, rest = path[-1]
        successor = next(rest, None)
        if successor is None:
            on_path.discard(at)
            path.pop()
        elif successor in on_path:
            yield at, successor
        elif successor not in seen:
            seen.add(successor)
            on_path.add(successor)
            path.append((successor, iter(sorted(successors[successor]))))
