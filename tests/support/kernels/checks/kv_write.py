"""Check RoPE and KV write against float64 and against XLA: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.norms import HeadNorms
from pallas_kernels.ops.kv_write.hopper import Config, packed, rope_and_write
from pallas_kernels.ops.kv_write.xla import write_kv
from pallas_kernels.rope import Turn
from pallas_kernels.rope import rotate as turn
from tests.support.kernels.interpreted import seed, without_races
from tests.support.kernels.ragged import deal, make
from tests.support.kernels.reference import error, quantized, rotate, written

PAGE, POOL = 16, 8
ROWS = [(1, 17), (3, 16), (1, 1), (2, 33)]  # around the ends of a page
TOKENS = 8  # one of them is padding
QUANTISED = [jnp.float8_e4m3fn, jnp.int8]
FIT = 2.0**-6  # most normal values of int8 fit, some are clipped; a power of two, so that no value is close to a tie


@dataclass(frozen=True)
class Step:
    """The arrays that one layer of a step writes."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    turn: tuple[jax.Array, jax.Array]
    pools: tuple[jax.Array, jax.Array]
    ragged: Ragged
    scales: Scales | None
    norms: HeadNorms | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.turn, *self.pools, self.ragged


def step(
    heads: int, kv_heads: int, dim: int, dtype: Any = jnp.bfloat16, stored: Any = None, *, normed: bool = False
) -> Step:
    random = np.random.default_rng(seed(heads))

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), dtype)

    ragged = make(ROWS, deal(ROWS, page=PAGE, pool=POOL), page=PAGE, pool=POOL, tokens=TOKENS, padded_rows=6)
    angle = random.uniform(0, 7, (TOKENS, 1, dim // 2)).astype(np.float32)
    pools = tuple(normal(POOL, PAGE, kv_heads, dim).astype(stored or dtype) for _ in range(2))
    scale = jnp.asarray([FIT, 2 * FIT] * kv_heads, jnp.float32)[:kv_heads]
    return Step(
        normal(TOKENS, heads, dim),
        normal(TOKENS, kv_heads, dim),
        normal(TOKENS, kv_heads, dim),
        (jnp.cos(angle), jnp.sin(angle)),
        (pools[0], pools[1]),
        ragged,
        None if stored is None else Scales(scale, scale / 2),
        HeadNorms(normal(dim), normal(dim), 1e-5, 1.0) if normed else None,
    )


def rope_and_write_xla(
    q: jax.Array, k: jax.Array, v: jax.Array, angles: Turn | None, k_pool: jax.Array, v_pool: jax.Array,
    ragged: Ragged, *, scales: Scales | None = None, norms: HeadNorms | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Do as the kernel in plain XLA: return the rotated queries and the pools."""
    if norms is not None:
        q, k = norms.apply(q, k)
    return turn(q, angles), *write_kv(k_pool, v_pool, turn(k, angles), v, ragged, scales)


SHAPES = [(4, 2, 64), (8, 1, 64), (8, 8, 64), (28, 4, 128), (4, 2, 256)]  # H, K, D


LARGEST_ERROR = {4: 1e-6, 2: 4e-3, 1: 2e-2}  # by bytes of a number; 8 bits: a number close to a tie moves by a unit


def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the norm of each head of x, computed in float64, with eps and offset as in `step`."""
    wide = np.asarray(x, np.float64)
    mean = np.mean(wide**2, axis=-1, keepdims=True)
    return jnp.asarray(wide / np.sqrt(mean + 1e-5) * (np.asarray(weight, np.float64) + 1.0), x.dtype)


def right(case: Step, got: Any, *, turned: bool = True) -> None:
    """Check the queries and pools that a step returned; slots that it did not write keep their bits."""
    q, *pools = got
    if case.norms is not None:
        case = replace(case, q=normed(case.q, case.norms.q), k=normed(case.k, case.norms.k))
    small = LARGEST_ERROR[jnp.dtype(case.q.dtype).itemsize]
    assert error(q, rotate(case.q, case.turn) if turned else case.q) < small
    keys = rotate(case.k, case.turn).astype(case.q.dtype) if turned else case.k
    slots = np.asarray(case.ragged.write)
    for after, before, new, scale in zip(pools, case.pools, (keys, case.v), case.scales or (None, None), strict=True):
        stored = new if scale is None else quantized(new, scale, before.dtype)
        assert after.dtype == before.dtype
        flat, want = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in (after, written(before, stored, slots)))
        at = slots[slots < len(flat)]
        assert error(flat[at], want[at]) < LARGEST_ERROR[jnp.dtype(before.dtype).itemsize]
        others = np.delete(np.arange(len(flat)), at)
        np.testing.assert_array_equal(flat[others], want[others])


def check(case: Step, *, turned: bool = True, config: Config | None = None) -> None:
    """Check the kernel against float64, then against its twin in XLA."""
    right(case, same_as_the_twin(case, turned=turned, config=config), turned=turned)


def same_as_the_twin(case: Step, *, turned: bool = True, config: Config | None = None) -> list[jax.Array]:
    """Compare bits, and return what the kernel wrote; for rotated 16-bit heads allow one unit in the last place.

    A program may contract the product and the sum of a rotation into one rounding, and the twin,
    which is not one program here, does not. Normed heads are only compared with float64, because
    a sum in another order may round a head the other way before it is rotated.
    """
    contracted = turned and case.scales is None
    arguments = list(case.arguments)
    if not turned:
        arguments[3] = None
    with without_races() as interpret:
        got = list(
            jax.block_until_ready(
                rope_and_write(
                    packed(*arguments[:3]), *arguments[3:], scales=case.scales, norms=case.norms, config=config,
                    interpret=interpret,
                )
            )
        )  # fmt: skip
    if case.norms is not None:
        return got
    want = rope_and_write_xla(*arguments, scales=case.scales)
    rtol, atol = (float(jnp.finfo(case.q.dtype).eps), 2.0**-22) if contracted else (0.0, 0.0)
    for one, other, turns in zip(got, want, (contracted, contracted, False), strict=True):
        mine, theirs = (np.asarray(part, np.float32) for part in (one, other))
        np.testing.assert_allclose(mine, theirs, rtol=rtol * turns, atol=atol * turns)
    return got
