"""Run a Hopper kernel on the host: the interpreter, and the seams where it cannot follow the device.

Every kernel takes `interpret`: None compiles it, `interpreter()` runs it in Python, with its warpgroups, barriers,
TMA copies and shared memory, so that what is tested is the kernel and not a twin of it. Three things go through this
file because the interpreter lacks them: matrix products with an operand in registers (`wgmma`, `mma`), register
layouts before 0.11 (`cast`), and the fence that reads by ordinary loads need where the device needs none (`fence`).

Letters here: M rows of the product, C what is summed over, N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import compat
from pallas_kernels.mosaic.compat import plgpu

Interpret = Any  # None, or what `interpreter` gives; hashable, so it may be a static argument of jit


def interpreter(*, detect_races: bool = False) -> Interpret:
    """The `interpret` argument that runs a kernel on the host. Races need jax 0.11; see `watch_races`."""
    return compat.interpreter_params(detect_races)


def is_interpreting(interpret: Interpret) -> bool:
    return interpret is not None


class Races:
    """Whether kernels run with `interpreter(detect_races=True)` had unordered accesses to one address."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []

    def found(self) -> bool:
        if not self.kernels:
            raise RuntimeError("no kernel has been run to its end yet: wait for its results, inside `watch_races`")
        return any(kernel.races_found for kernel in self.kernels)


@contextmanager
def watch_races() -> Iterator[Races]:
    """Of all kernels that run within, to be asked once their results are there (`block_until_ready`)."""
    races = Races()
    with compat.watched_kernels() as kernels:
        races.kernels = kernels
        yield races


def cast(x: jax.Array, layout: Any, interpret: Interpret) -> jax.Array:
    """`x` laid over the registers as `layout` says."""
    if is_interpreting(interpret) and not compat.DETECTS_RACES:
        return x
    laid: jax.Array = plgpu.layout_cast(x, layout)
    return laid


def fence(interpret: Interpret) -> None:
    """After a product whose operands are to be overwritten by TMA, before their slot is released.

    The tensor core reads shared memory by the same path as TMA. The interpreter's stand-in reads it by ordinary
    loads, which without this would be told as a race.
    """
    if is_interpreting(interpret):
        plgpu.commit_smem()


def wgmma(
    a: Any,
    b: Any,
    acc: jax.Array | None = None,
    *,
    transposed: bool = False,
    meanwhile: Callable[[], None] | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """acc + a @ b in float32 [M, N] by one warpgroup, waited for. M = 64 a warpgroup.

    a [M, C]: a ref in shared memory, or an array in registers of `Layout.WGMMA`. b: a ref in shared memory, [C, N], or
    [N, C] where `transposed`. Write registers to shared memory only before a `commit_smem`. `meanwhile` is called
    between issuing the product and waiting for it, where there is no acc; it may not touch the operands.
    """
    in_registers = isinstance(a, jax.Array)
    if is_interpreting(interpret) and (in_registers or not compat.DETECTS_RACES):
        plain = _plain(a if in_registers else a[...], b[...], acc, transposed)
        if meanwhile is not None:
            meanwhile()
        return plain
    right = compat.transpose(b) if transposed else b
    assert acc is None or meanwhile is None, "an acc is not summed beside other work"
    if acc is not None and not is_interpreting(interpret):
        summed: jax.Array = pl.run_state(lambda ref: plgpu.wgmma(ref, a, right))(plgpu.ACC.init(acc))
        return summed
    shape = (a.shape[0], b.shape[0 if transposed else 1])

    def fresh(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, a, right)
        if meanwhile is not None:
            meanwhile()
        read: jax.Array = ref[...]
        return read

    product: jax.Array = pl.run_scoped(fresh, plgpu.ACC(shape, jnp.float32))
    return product if acc is None else acc + product


def wgmmas(acc: jax.Array, pairs: Sequence[tuple[Any, Any]], interpret: Interpret = None) -> jax.Array:
    """acc + the sum of a @ b over `pairs` of refs in shared memory, issued together and waited for once."""
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
    """acc + a @ b by warp-level products: acc [M, N] of `Layout.MMA_ACC`, a [M, C] `MMA_LHS`, b [C, N] `MMA_RHS`."""
    if is_interpreting(interpret):
        return _plain(a, b, acc, False)
    product: jax.Array = plgpu.mma(acc, a, b)
    return product


def _plain(a: jax.Array, b: jax.Array, acc: jax.Array | None, transposed: bool) -> jax.Array:
    left, right = a.astype(jnp.float32), b.astype(jnp.float32)
    product = jnp.dot(left, right.T if transposed else right, preferred_element_type=jnp.float32)
    return product if acc is None else acc + product
