"""PTX instructions of Hopper that Mosaic does not expose; call these within `plgpu.inline_mgpu`.

All values are MLIR values. A *register* is the vector of adjacent elements that a thread holds; a
*word* is 32 bits of a register.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jaxlib.mlir.dialects.llvm as _llvm
import jaxlib.mlir.dialects.vector as _vector
import jaxlib.mlir.ir as _ir
from jax.experimental.mosaic.gpu import FragmentedArray as _FragmentedArray
from jax.experimental.mosaic.gpu import utils as _utils

ir: Any = _ir
llvm: Any = _llvm
vector: Any = _vector
FragmentedArray: Any = _FragmentedArray
utils: Any = _utils

# e4m3 has a conversion instruction. For int8, x + 128 is the low byte of the float16 number 1024 + 128 + x.
HALVES = {
    "e4m3": "mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;",
    "int8": """xor.b32 x, $2, 0x80808080; mov.b32 m, 0x64806480;
        prmt.b32 y, x, 0x64646464, 0x4140; sub.f16x2 $0, y, m;
        prmt.b32 z, x, 0x64646464, 0x4342; sub.f16x2 $1, z, m;""",
}
# Barrier 0 is that of the whole block, and the others those of its warpgroups, in order. One thread counts for all,
# between two barriers, and the second tells the others. atom.dec takes 0 to the largest count.
COUNT_DOWN = """{ .reg .pred first, last; .reg .b32 thread, group, old;
    mov.u32 thread, %tid.x; shr.u32 group, thread, 7; add.u32 group, group, 1; and.b32 thread, thread, 127;
    setp.eq.u32 first, thread, 0; setp.ne.u32 last, thread, thread;
    bar.sync group, 128;
    @first fence.acq_rel.gpu;
    @first atom.acq_rel.gpu.dec.u32 old, [$1], $2;
    @first setp.eq.u32 last, old, 0;
    bar.red.or.pred last, group, 128, last;
    selp.b32 $0, 1, 0, last; }"""
TURNS = 0x5140, 0x7362  # bytes 0, 4, 1, 5 and 2, 6, 3, 7 of two words


def _word() -> Any:
    return ir.IntegerType.get_signless(32)


def words(register: Any) -> list[Any]:
    """Split a register into words, in order."""
    kind = ir.VectorType(register.type)
    narrow = ir.IntegerType.get_signless(8)
    if kind.element_type != narrow and kind.element_type == ir.Float8E4M3FNType.get():
        register = vector.bitcast(ir.VectorType.get(kind.shape, narrow), register)
    bits = {narrow: 8, ir.F16Type.get(): 16}[ir.VectorType(register.type).element_type]
    several = vector.bitcast(ir.VectorType.get((kind.shape[0] * bits // 32,), _word()), register)
    return [vector.extract(several, [], [i]) for i in range(kind.shape[0] * bits // 32)]


def register_of(words: Sequence[Any]) -> Any:
    """Join words into a register of float16."""
    several = vector.from_elements(ir.VectorType.get((len(words),), _word()), list(words))
    return vector.bitcast(ir.VectorType.get((2 * len(words),), ir.F16Type.get()), several)


def halves(word: Any, stored: Any) -> tuple[Any, Any]:
    """Widen the four 8-bit values of a word, of MLIR type `stored`, to two words of float16."""
    text = HALVES["e4m3" if stored == ir.Float8E4M3FNType.get() else "int8"]
    text = f"{{ .reg .b16 a, b; .reg .b32 x, y, z, m; {text} }}"
    both = llvm.inline_asm(llvm.StructType.get_literal([_word()] * 2), [word], text, "=r,=r,r", has_side_effects=False)
    return llvm.extractvalue(_word(), both, [0]), llvm.extractvalue(_word(), both, [1])


def crossed(first: Any, second: Any) -> tuple[Any, Any]:
    """Interleave the bytes of two words: the low two bytes of each, then the high two of each."""
    return _permuted(first, second, TURNS[0]), _permuted(first, second, TURNS[1])


def _permuted(first: Any, second: Any, order: int) -> Any:
    text = f"prmt.b32 $0, $1, $2, {order:#x};"
    return llvm.inline_asm(_word(), [first, second], text, "=r,r,r", has_side_effects=False)


def mma(sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    """Add one warp's 16 x 16 by 16 x 8 float16 product to `sums`, a thread's 4 float32.

    `left` has 4 words and `right` 2, in PTX's fragment layout of mma.m16n8k16.
    """
    single = ir.F32Type.get()
    text = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    operands, constraints = [*left, *right, *sums], ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    results = llvm.inline_asm(
        llvm.StructType.get_literal([single] * 4), operands, text, constraints, has_side_effects=False
    )
    return [llvm.extractvalue(single, results, [i]) for i in range(4)]


def zeros() -> list[Any]:
    """Return the four zeros that `mma` starts from."""
    single = ir.F32Type.get()
    return [llvm.mlir_constant(ir.FloatAttr.get(single, 0.0)) for _ in range(4)]


def pair(values: Sequence[Any]) -> Any:
    """Join two float32 into a register."""
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), list(values))


def singles(register: Any) -> list[Any]:
    """Split a register into its float32 elements."""
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]


def count_down(counter: Any, most: Any) -> Any:
    """Take one from `counter`, a rank-0 ref in global memory, or 0 to `most`; return whether it was 0, as a word.

    Every thread of a warpgroup calls it. Their stores come before the count, and the loads after it
    see the stores that came before the earlier counts.
    """
    operands = [utils.memref_ptr(counter), most]
    return llvm.inline_asm(_word(), operands, COUNT_DOWN, "=r,l,r,~{memory}", has_side_effects=True)
