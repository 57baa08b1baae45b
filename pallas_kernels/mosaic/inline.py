"""Instructions of Hopper that Mosaic has no operation for, in PTX: to be called within `plgpu.inline_mgpu`.

Values are MLIR's: a register is a vector of what a thread has side by side, a word 32 bits of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jaxlib.mlir.dialects.llvm as _llvm
import jaxlib.mlir.dialects.vector as _vector
import jaxlib.mlir.ir as _ir
from jax.experimental.mosaic.gpu import FragmentedArray as _FragmentedArray

ir: Any = _ir
llvm: Any = _llvm
vector: Any = _vector
FragmentedArray: Any = _FragmentedArray

# e4m3 has an instruction. Of an integer x, the bits of x + 128 are the last eight of 1024 + 128 + x in float16.
HALVES = {
    "e4m3": "mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;",
    "int8": """xor.b32 x, $2, 0x80808080; mov.b32 m, 0x64806480;
        prmt.b32 y, x, 0x64646464, 0x4140; sub.f16x2 $0, y, m;
        prmt.b32 z, x, 0x64646464, 0x4342; sub.f16x2 $1, z, m;""",
}
TURNS = 0x5140, 0x7362  # bytes 0, 4, 1, 5 and 2, 6, 3, 7 of two words


def _word() -> Any:
    return ir.IntegerType.get_signless(32)


def words(register: Any) -> list[Any]:
    """The words of a register, in order."""
    kind = ir.VectorType(register.type)
    narrow = ir.IntegerType.get_signless(8)
    if kind.element_type != narrow and kind.element_type == ir.Float8E4M3FNType.get():
        register = vector.bitcast(ir.VectorType.get(kind.shape, narrow), register)
    bits = {narrow: 8, ir.F16Type.get(): 16}[ir.VectorType(register.type).element_type]
    several = vector.bitcast(ir.VectorType.get((kind.shape[0] * bits // 32,), _word()), register)
    return [vector.extract(several, [], [i]) for i in range(kind.shape[0] * bits // 32)]


def register_of(found: Sequence[Any]) -> Any:
    """A register of float16 of these words."""
    several = vector.from_elements(ir.VectorType.get((len(found),), _word()), list(found))
    return vector.bitcast(ir.VectorType.get((2 * len(found),), ir.F16Type.get()), several)


def halves(word: Any, stored: Any) -> tuple[Any, Any]:
    """Four values of 8 bits as two words of float16: the first two, and the last two. `stored`: their MLIR type."""
    text = HALVES["e4m3" if stored == ir.Float8E4M3FNType.get() else "int8"]
    text = f"{{ .reg .b16 a, b; .reg .b32 x, y, z, m; {text} }}"
    both = llvm.inline_asm(llvm.StructType.get_literal([_word()] * 2), [word], text, "=r,=r,r", has_side_effects=False)
    return llvm.extractvalue(_word(), both, [0]), llvm.extractvalue(_word(), both, [1])


def crossed(first: Any, second: Any) -> tuple[Any, Any]:
    """Bytes of two words by turns: of the first two of each, and of the last two of each."""
    return _permuted(first, second, TURNS[0]), _permuted(first, second, TURNS[1])


def _permuted(first: Any, second: Any, order: int) -> Any:
    text = f"prmt.b32 $0, $1, $2, {order:#x};"
    return llvm.inline_asm(_word(), [first, second], text, "=r,r,r", has_side_effects=False)


def mma(sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    """One warp's product of 16 x 16 by 16 x 8, float16, added to `sums`, the 4 float32 of a thread.

    4 words of `left`, 2 of `right`, as PTX lays out the fragments of mma.m16n8k16.
    """
    single = ir.F32Type.get()
    text = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    operands, constraints = [*left, *right, *sums], ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    made = llvm.inline_asm(
        llvm.StructType.get_literal([single] * 4), operands, text, constraints, has_side_effects=False
    )
    return [llvm.extractvalue(single, made, [i]) for i in range(4)]


def zeros() -> list[Any]:
    """Of what `mma` adds to."""
    single = ir.F32Type.get()
    return [llvm.mlir_constant(ir.FloatAttr.get(single, 0.0)) for _ in range(4)]


def pair(values: Sequence[Any]) -> Any:
    """A register of two float32."""
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), list(values))


def singles(register: Any) -> list[Any]:
    """The float32 of a register."""
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]
