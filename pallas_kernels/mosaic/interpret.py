"""Run a Hopper kernel on the host, with stand-ins for what the interpreter lacks.

Every kernel takes `interpret`: None compiles it; `interpreter()` runs it in Python, including its
warpgroups, barriers, TMA copies and shared memory, so tests run the kernel itself. The interpreter
lacks three things that this file supplies: matrix products with an operand in registers (`wgmma`,
`mma`), register layouts before jax 0.11 (`cast`), and a fence that its ordinary loads need although
the device's do not (`fence`).

Letters: M rows of the product, C contracted dimension, N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu

T = TypeVar("T")
Interpret = Any  # None, or the result of `interpreter`; hashable, so it can be a static argument of jit


def interpreter(*, detect_races: bool = False) -> Interpret:
    """Return the `interpret` argument that runs a kernel on the host.

    Race detection needs jax 0.11; see `watch_races`.
    """
    return compat.interpreter_params(detect_races)


def is_interpreting(interpret: Interpret) -> bool:
    return interpret is not None


class Races:
    """The races of kernels run with `interpreter(detect_races=True)`: unordered accesses to one address."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []

    def found(self) -> bool:
        if not self.kernels:
            raise RuntimeError("no kernel has finished yet: wait for its results inside `watch_races`")
        return any(kernel.races_found for kernel in self.kernels)


@contextmanager
def watch_races(*, in_order: bool = False) -> Iterator[Races]:
    """Collect the races of all kernels run inside; query them when the results are ready (`block_until_ready`).

    `in_order`: blocks of a kernel do not race with each other, as if each began after the one before;
    for kernels whose blocks order themselves by counters (countdown.py).
    """
    races = Races()
    with compat.watched_kernels(in_order=in_order) as kernels:
        races.kernels = kernels
        yield races


def cast(x: jax.Array, layout: Any, interpret: Interpret) -> jax.Array:
    """Lay `x` out over the registers as `layout` says."""
    if is_interpreting(interpret) and not compat.DETECTS_RACES:
        return x
    laid: jax.Array = plgpu.layout_cast(x, layout)
    return laid


def iota(size: tuple[int, ...], axis: int, layout: Any, interpret: Interpret) -> jax.Array:
    """Return the index along `axis`, laid out over the registers as `layout` says."""
    if is_interpreting(interpret) and not compat.DETECTS_RACES:
        return lax.broadcasted_iota(jnp.int32, size, axis)
    counted: jax.Array = plgpu.broadcasted_iota(jnp.int32, size, axis, layout=layout)
    return counted


def fence(interpret: Interpret) -> None:
    """Order a product's reads before TMA overwrites its operands; call it before releasing their slot.

    On the device the tensor core reads shared memory through the same proxy as TMA, so nothing is
    needed. The interpreter's stand-in uses ordinary loads, which would otherwise be reported as a
    race.
    """
    if is_interpreting(interpret):
        plgpu.commit_smem()


def filled(value: float, shape: tuple[int, ...], layout: Any, interpret: Interpret) -> jax.Array:
    """Return a float32 array of one value in registers of `layout`."""
    return cast(jnp.full(shape, value, jnp.float32), layout, interpret)


def wgmma(
    a: Any, b: Any, acc: jax.Array | None = None, *, transposed: bool = False, interpret: Interpret = None
) -> jax.Array:
    """Return acc + a @ b, float32 [M, N], by one warpgroup, and wait for it; M = 64.

    a [M, C]: a ref in shared memory, or an array in registers of `Layout.WGMMA`. b: a ref in shared
    memory, [C, N], or [N, C] if `transposed`. Registers stored to shared memory need a
    `commit_smem` first.
    """
    if acc is not None and not is_interpreting(interpret):
        right = compat.transpose(b) if transposed else b
        summed: jax.Array = pl.run_state(lambda ref: plgpu.wgmma(ref, a, right))(plgpu.ACC.init(acc))
        return summed
    product, _ = wgmma_while(a, b, lambda: None, transposed=transposed, interpret=interpret)
    return product if acc is None else acc + product


def wgmma_while(
    a: Any, b: Any, meanwhile: Callable[[], T], *, transposed: bool = False, interpret: Interpret = None
) -> tuple[jax.Array, T]:
    """Return a @ b as `wgmma` does, and the result of `meanwhile`, which runs after issuing the product.

    `meanwhile` must not touch the operands. It may compute further products, which wait for this one
    too.
    """
    in_registers = isinstance(a, jax.Array)
    if is_interpreting(interpret) and (in_registers or not compat.DETECTS_RACES):
        return _plain(a if in_registers else a[...], b[...], None, transposed), meanwhile()
    right = compat.transpose(b) if transposed else b

    def fresh(ref: Any) -> tuple[jax.Array, T]:
        plgpu.wgmma(ref, a, right)
        done = meanwhile()
        return ref[...], done

    shape = (a.shape[0], b.shape[0 if transposed else 1])
    results: tuple[jax.Array, T] = pl.run_scoped(fresh, plgpu.ACC(shape, jnp.float32))
    return results


def wgmmas(acc: jax.Array, pairs: Sequence[tuple[Any, Any]], interpret: Interpret = None) -> jax.Array:
    """Return acc + the sum of a @ b over `pairs` of refs in shared memory, issued together with one wait."""
    if is_interpreting(interpret):
        for a, b in pairs:
            acc = wgmma(a, b, acc, interpret=interpret)
        return acc

    def summed(ref: Any) -> None:
        for a, b in pairs:
            plgpu.wgmma(ref, a, b)

    product: jax.Array = pl.run_state(summed)(plgpu.ACC.init(acc))
    return product


def mma(acc: jax.Array, a: jax.Array, b: jax.Array, interpret: Interpret = None) -> jax.Array:
    """Return acc + a @ b by warp-level products: acc [M, N] `MMA_ACC`, a [M, C] `MMA_LHS`, b [C, N] `MMA_RHS`."""
    if is_interpreting(interpret):
        return _plain(a, b, acc, False)
    product: jax.Array = plgpu.mma(acc, a, b)
    return product


def _plain(a: jax.Array, b: jax.Array, acc: jax.Array | None, transposed: bool) -> jax.Array:
    left, right = a.astype(jnp.float32), b.astype(jnp.float32)
    product = jnp.dot(left, right.T if transposed else right, preferred_element_type=jnp.float32)
    return product if acc is None else acc + product
