"""Online softmax over chunks of pages: what one token per row and rows of many tokens have in common.

Letters as in `attention_xla`. Every state is float32, and a chunk in which a query sees nothing leaves it as it is,
bit for bit: what a row gets does not hang on how far the rows beside it reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MASKED

Parts = tuple[jax.Array, ...]  # mixed values, and the lse where it is asked for


@dataclass(frozen=True)
class Rule:
    """How scores are bent and limited, and what comes out."""

    window: int | None = None  # a query sees this many keys at most, its own included
    softcap: float | None = None
    v_scale: jax.Array | None = None  # [K] float32, what a quantised pool's values are multiplied by
    lse: bool = False

    def begin(self, position: jax.Array) -> jax.Array:
        """First key that a query at `position` sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position + 1 - self.window, 0)


class Running(NamedTuple):
    """Highest score, sum of weights and weighted values so far."""

    peak: jax.Array  # [..., rows]
    total: jax.Array  # [..., rows]
    mixed: jax.Array  # [..., rows, D]


def begin(shape: tuple[int, ...], dim: int) -> Running:
    zeros = jnp.zeros(shape, jnp.float32)
    return Running(zeros + MASKED, zeros, jnp.zeros((*shape, dim), jnp.float32))


def absorb(
    state: Running, score: jax.Array, seen: jax.Array, mix: Callable[[jax.Array], jax.Array], softcap: float | None
) -> Running:
    """The state with one more chunk: score [..., rows, C], seen broadcast to it, `mix` weights -> [..., rows, D]."""
    if softcap is not None:
        score = softcap * jnp.tanh(score / softcap)
    score = jnp.where(seen, score, MASKED)
    peak = jnp.maximum(state.peak, jnp.max(score, axis=-1))
    # Where nothing was seen yet the peak itself is MASKED: measured from half of it, masked scores weigh nothing.
    weight = jnp.exp(score - jnp.maximum(peak, MASKED / 2)[..., None])
    fade = jnp.exp(state.peak - peak)
    return Running(peak, state.total * fade + jnp.sum(weight, axis=-1), state.mixed * fade[..., None] + mix(weight))


def mean(state: Running) -> jax.Array:
    """Weighted mean of the values; zeros where nothing was attended to."""
    return state.mixed / jnp.maximum(state.total, 1e-30)[..., None]


def lse(state: Running) -> jax.Array:
    """Log of the sum of exp(score); MASKED where nothing was attended to (a total is 1 at least otherwise)."""
    return jnp.where(state.total > 0, state.peak + jnp.log(jnp.maximum(state.total, 1e-30)), MASKED)


@dataclass(frozen=True)
class Pages:
    """Keys and values of one layer: pools [N, B, K, D], or [N, K, B, D] with heads first."""

    k: jax.Array
    v: jax.Array
    heads_first: bool

    @property
    def letters(self) -> str:
        """Of the pools' shape."""
        return "[N, K, B, D]" if self.heads_first else "[N, B, K, D]"

    @property
    def size(self) -> int:
        """B"""
        return int(self.k.shape[2 if self.heads_first else 1])

    @property
    def heads(self) -> int:
        """K"""
        return int(self.k.shape[1 if self.heads_first else 2])

    def read(self, ids: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Whole pages `ids` [..., c] as keys and values [..., c * B, K, D], or [..., K, c * B, D] with heads first. One
        gather each, of long contiguous slices."""
        *rows, count = ids.shape
        merged = (self.heads, count * self.size) if self.heads_first else (count * self.size, self.heads)
        places = (0, 2, 3) if self.heads_first else (1, 2, 3)  # of a page's axes in the result, after `rows`
        dims = lax.GatherDimensionNumbers(
            offset_dims=tuple(len(rows) + place for place in places), collapsed_slice_dims=(0,), start_index_map=(0,)
        )

        def taken(pool: jax.Array) -> jax.Array:
            got = lax.gather(pool, ids[..., None], dims, (1, *pool.shape[1:]), mode="clip")
            return got.reshape(*rows, *merged, pool.shape[3]).astype(dtype)

        return taken(self.k), taken(self.v)


def missing(columns: int, pages: int) -> int:
    """Columns that a block table lacks to be two chunks or more. Of one chunk XLA knows what every turn of the loop
    reads: on CPU it moves the gather out of the loop and copies the whole pool for it, a second for 2 GiB."""
    return max(2 * pages - columns, -columns % pages)
