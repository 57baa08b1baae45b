"""Warp-level products with 8-bit keys and values, which reach the tensor core through registers only.

Each warp of a warpgroup takes 16 of every 64 keys and multiplies all query rows by them. A fragment
may assign any elements to a thread if both operands agree: head dimensions are contracted in an
order in which a thread's elements are adjacent in a row of keys, and a thread holds W adjacent
columns of the values. Both are therefore loaded 16 (or 8) bytes at a time, widened two values per
instruction (inline.py), and are then fragments of mma.m16n8k16 as they are: nothing is written back
to shared memory, and threads exchange nothing. The weights stay in the registers of the scores.

Letters: C keys of a tile, D head dim, W adjacent columns of values. The results of the four warps
are stacked: row 16 w + r is warp w's result for query row r.

    lane 4 g + t of warp w has      in registers
    queries [16, D]                 rows 8 a + g, dimensions 64 h + 16 t + b, b < 16
    keys [C, D]                     keys 64 c + 16 w + 8 j + g, dimensions 64 h + 16 t + b
    values [C, D]                   keys 64 c + 16 w + 8 j + 2 t + e, columns 8 W x + W g + b, b < W
    scores, weights [64, C / 4]     of column 16 c + 8 j + n: key 64 c + 16 w + 8 j + n
    mixed [64, D]                   of column 8 (W x + b) + n: column 8 W x + W n + b of the values (`in_order`)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic import inline
from pallas_kernels.mosaic.compat import plgpu
from pallas_kernels.mosaic.interpret import Interpret, is_interpreting
from pallas_kernels.mosaic.widen import tiled

ROWS = 16  # query rows
WARPS, OWN = 4, 16  # warps of a warpgroup, and each warp's keys of every 64
CHUNK = 64  # dimensions of a row that four threads hold


def span(dim: int) -> int:
    """Return W for values of `dim` columns."""
    return 8 if dim % 128 else 16


def queries() -> Any:
    """Return the register layout of queries, replicated over warps."""
    return tiled((16, CHUNK), (8, CHUNK), (16,), (8,), warps=(plgpu.Replicated(WARPS),), lanes=(-4, -3))


def keys() -> Any:
    """Return the register layout of keys."""
    return tiled((64, CHUNK), (16, CHUNK), (8, CHUNK), (16,), warps=(-7,), lanes=(-3, -2))


def values(dim: int) -> Any:
    """Return the register layout of values."""
    wide = 8 * span(dim)
    return tiled((64, wide), (16, wide), (8, wide), (2, span(dim)), warps=(-8,), lanes=(-3, -4))


KEY_SWIZZLE = 64  # bytes of a key row swizzled together, so that loads of `keys` have no bank conflicts


def in_order(mixed: jax.Array, width: int) -> jax.Array:
    """Restore the column order of the values in mixed [..., D], computed by products of `width` columns."""
    dim, wide = mixed.shape[-1], span(width)
    parts = mixed.reshape(*mixed.shape[:-1], dim // (8 * wide), wide, 8)
    return jnp.swapaxes(parts, -1, -2).reshape(mixed.shape)


def arranged(q: jax.Array) -> jax.Array:
    """Reorder queries [..., 16, D] so that each 16 bytes that a thread has are a fragment as they are.

    A fragment needs words of rows g and g + 8 in turn. Of words in the order of the rows it would take four moves per
    product, since registers are too few to keep the fragments of wide queries.
    """
    return _turned(q, (4, 1, 2, 3, 5, 6, 0, 7))


def _turned(q: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Transpose the bits of q's indices: row 8 a + g, dimension 64 h + 16 t + 8 s + 4 b + 2 c + e."""
    outer = q.shape[:-2]
    bits = q.reshape(*outer, 2, 8, -1, 4, 2, 2, 2, 2)
    return bits.transpose(*range(len(outer)), *(len(outer) + at for at in order)).reshape(q.shape)


def scores(
    q: jax.Array, k: jax.Array, interpret: Interpret = None, into: jax.Array | None = None, *, ready: bool = False
) -> jax.Array:
    """Return q k^T, float32 [64, C / 4], of q [16, D] float16 and 8-bit k [C, D], added to `into` if given.

    `ready`: q is `arranged`.
    """
    tokens = k.shape[0]
    if is_interpreting(interpret):
        q = _turned(q, (6, 1, 2, 3, 0, 4, 5, 7)) if ready else q
        every = jnp.dot(q.astype(jnp.float32), k.astype(jnp.float32).T, preferred_element_type=jnp.float32)
        parts = every.reshape(ROWS, tokens // 64, WARPS, OWN)
        by_warp = parts.transpose(2, 0, 1, 3).reshape(WARPS * ROWS, tokens // WARPS)
        return by_warp if into is None else into + by_warp
    wgmma = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct((WARPS * ROWS, tokens // WARPS), jnp.float32, layout=wgmma)
    before = () if into is None else (into,)
    make = plgpu.inline_mgpu(arg_types=(queries(), keys(), *(wgmma for _ in before)), return_type=result)
    products: jax.Array = make(lambda _, *operands: _scores(*operands, ready=ready))(q, k, *before)
    return products


def mix(mixed: jax.Array, weight: jax.Array, v: jax.Array, interpret: Interpret = None) -> jax.Array:
    """Return mixed + weight v, float32 [64, D], of weight [64, C / 4] float16 and 8-bit v [C, D]."""
    tokens, dim = v.shape
    if is_interpreting(interpret):
        left = weight.astype(jnp.float32).reshape(WARPS, ROWS, tokens // WARPS)
        right = v.astype(jnp.float32).reshape(tokens // 64, WARPS, OWN, dim).swapaxes(0, 1)
        product = jnp.einsum("wrc,wcd->wrd", left, right.reshape(WARPS, tokens // WARPS, dim))
        parts = product.reshape(WARPS * ROWS, dim // (8 * span(dim)), 8, span(dim))
        return mixed + parts.swapaxes(2, 3).reshape(mixed.shape)
    wgmma = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(mixed.shape, jnp.float32, layout=wgmma)
    make = plgpu.inline_mgpu(arg_types=(wgmma, wgmma, values(dim)), return_type=result)
    products: jax.Array = make(lambda _, acc, left, right: _mix(acc, left, right))(mixed, weight, v)
    return products


def _scores(q: Any, k: Any, into: Any = None, *, ready: bool = False) -> Any:
    tokens, chunks = k.shape[0], k.shape[1] // CHUNK
    begun = None if into is None else into.registers.reshape(tokens // 64, 2, 2)  # c, j, a
    left = q.registers.reshape(chunks, 2, 2)  # h, a, eight dimensions
    right = k.registers.reshape(tokens // 64, chunks, 2)  # c, h, j
    registers = np.empty((tokens // 64, 2, 2), object)  # c, j, a
    for c, j in np.ndindex(tokens // 64, 2):
        sums = inline.zeros() if begun is None else [single for half in begun[c, j] for single in inline.singles(half)]
        for h in range(chunks):
            rows = [[word for eight in left[h, a] for word in inline.words(eight)] for a in range(2)]
            for step, word in enumerate(inline.words(right[c, h, j])):
                fragment = [rows[a][2 * step + half] for half in range(2) for a in range(2)]
                if ready:
                    fragment = inline.words(left[h, step // 2, step % 2])
                sums = inline.mma(sums, fragment, inline.halves(word, k.mlir_dtype))
        registers[c, j] = [inline.pair(sums[:2]), inline.pair(sums[2:])]
    return _product(registers, (WARPS * ROWS, tokens // WARPS))


def _mix(acc: Any, weight: Any, v: Any) -> Any:
    (tokens, dim), wide = v.shape, span(v.shape[1])
    left = weight.registers.reshape(tokens // 64, 4)  # c; j, a
    right = v.registers.reshape(tokens // 64, dim // (8 * wide), 2, 2)  # c, x, j, e
    sums = [inline.singles(upper) + inline.singles(lower) for upper, lower in acc.registers.reshape(dim // 8, 2)]
    for c, x in np.ndindex(right.shape[:2]):
        fragment = [inline.words(register)[0] for register in left[c]]
        below = [[inline.words(register) for register in two] for two in right[c, x]]  # j, e, words
        for word in range(wide // 4):
            # Interleave the bytes of two keys, then widen: each word holds two keys of one column, as a fragment needs.
            pairs = [
                [
                    half
                    for both in inline.crossed(*(words[word] for words in two))
                    for half in inline.halves(both, v.mlir_dtype)
                ]
                for two in below
            ]
            for b in range(4):
                column = x * wide + 4 * word + b
                sums[column] = inline.mma(sums[column], fragment, [two[b] for two in pairs])
    registers = np.empty((dim // 8, 2), object)
    for column, four in enumerate(sums):
        registers[column] = [inline.pair(four[:2]), inline.pair(four[2:])]
    return _product(registers, acc.shape)


def _product(registers: Any, shape: tuple[int, int]) -> Any:
    layout = plgpu.Layout.WGMMA.to_mgpu()
    return inline.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )
