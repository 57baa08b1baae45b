"""Register layouts of whole rows that a warpgroup loads from and stores to global memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from pallas_kernels.mosaic import compat


def spread(heads: tuple[int, ...], columns: int, longest: int = 8) -> Any:
    """Return a layout of [*heads, columns] over the 128 threads of a warpgroup, in vectors of adjacent columns.

    Prefers layouts in which all four warps have their own heads, then long vectors (`longest`
    elements: 16 bytes of bfloat16). With few heads, several warps hold the same data and store it
    twice.
    """
    from jax.experimental.mosaic.gpu import fragmented_array

    layouts: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
    vector = max(1, columns // 32)  # or a head would be longer than a warp
    while vector <= longest and columns % vector == 0 and (32 * vector) % columns == 0:
        for lanes in _factors(heads, 32 * vector // columns):  # heads of a warp
            left = tuple(size // each for size, each in zip(heads, lanes, strict=True))
            warps = next(split for count in (4, 2, 1) for split in _factors(left, count))
            layouts.append((prod(warps), vector, warps, lanes))
        vector *= 2
    if not layouts:
        raise ValueError(f"no layout for {heads=} of {columns=} over 128 threads")
    count, vector, warps, lanes = max(layouts)
    rank = len(heads)
    inner = (*lanes, columns)
    outer = tuple(a * b for a, b in zip(warps, lanes, strict=True))
    replicas = () if count == 4 else (fragmented_array.Replicated(4 // count),)
    layout: Any = fragmented_array.TiledLayout(
        fragmented_array.Tiling(((*outer, columns), inner, (vector,))),
        warp_dims=(*(-2 * rank - 3 + at for at in range(rank) if warps[at] > 1), *replicas),
        lane_dims=tuple(range(-rank - 2, -1)),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return compat.plgpu.Layout.TILED(
        layout.tiling, warp_dims=layout.warp_dims, lane_dims=layout.lane_dims, vector_dim=layout.vector_dim
    )


def _factors(sizes: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `count` as a product of divisors of `sizes`, one each."""
    if not sizes:
        if count == 1:
            yield ()
        return
    for each in range(1, min(sizes[0], count) + 1):
        if sizes[0] % each == 0 and count % each == 0:
            yield from ((each, *rest) for rest in _factors(sizes[1:], count // each))
