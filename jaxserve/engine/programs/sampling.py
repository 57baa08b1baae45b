"""Sampling on the device.

A token depends on its logits, its request's parameters and seed, and its position, and never on the
batch, the row, the schedule or the mesh.

There are two programs: `draw` supports temperature, top-k, top-p and min-p; `draw_full` supports
all parameters. For rows that only use the former, both sample the same tokens. Each has a form with
masks of the tokens that rows may sample (`only_allowed`).

Letters: G sampling rows, V vocabulary, A adjusted tokens of a row, W words of a mask, 32 tokens each.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.engine.programs.logprobs import logprobs_of
from jaxserve.sched.api.params import MAX_LOGPROBS
from pallas_kernels.ops.sampling_threshold.api import Thresholds
from pallas_kernels.ops.sampling_threshold.search import LOG2_E, Options
from pallas_kernels.ops.sampling_threshold.xla import thresholds as by_xla

BAD = -1  # in place of a token if the logits are not finite
SEEN_IN_PROMPT = 1 << 14  # flag in a count: the token is in the prompt; the lower bits count how often it was sampled
MOST_COUNTED = SEEN_IN_PROMPT - 1
MASKED = -1e30
ADJUSTED = 512  # A: 300 biases and 212 banned ids
ADJUST_BLOCK = 32


class Column(IntEnum):
    """The sampling inputs of a row, one int32 each; floats as their bits."""

    SLOT = 0  # row of the carry; out of range for padding
    POSITION = 1  # of the token to sample
    SEED = 2
    SEED_HIGH = 3
    TEMPERATURE = 4  # float; 0 is greedy
    TOP_K = 5  # 0: off
    TOP_P = 6  # float
    MIN_P = 7  # float
    REPETITION = 8  # float
    PRESENCE = 9  # float
    FREQUENCY = 10  # float
    HISTORY = 11  # slot with the row's token counts; out of range: none
    LOGPROBS = 12  # 1: requested


class SamplingRows(NamedTuple):
    """The sampling inputs of a step, by column [G]."""

    packed: jax.Array  # [G, len(Column)] int32

    def ints(self, column: Column) -> jax.Array:
        return self.packed[:, column]

    def floats(self, column: Column) -> jax.Array:
        return lax.bitcast_convert_type(self.packed[:, column], jnp.float32)


class Adjust(NamedTuple):
    """The logit bias and banned tokens of each row; ids out of range are padding."""

    ids: jax.Array  # [G, A] int32
    values: jax.Array  # [G, A] float32, added; -inf bans
    used: jax.Array  # [] int32, largest number of columns that a row uses


def draw(logits: jax.Array, rows: SamplingRows, thresholds: Thresholds = by_xla) -> jax.Array:
    """Sample tokens [G] int32 by temperature, min-p, top-k and top-p from logits [G, V] float32.

    BAD if a row's logits are not finite.
    """
    tokens, top = _drawn(logits, rows, thresholds)
    return jnp.where(jnp.isfinite(top), tokens, BAD)


def only_allowed(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Return logits [G, V] that are -inf for the tokens whose bits in `masks` [G, W] int32 are 0.

    Rows that are not finite become NaN, also if only tokens that are not allowed are not finite.
    """
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1  # [G, W, 32]
    bits = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(finite(logits)[:, None], jnp.where(bits > 0, logits, -jnp.inf), jnp.nan)


def _drawn(x: jax.Array, rows: SamplingRows, thresholds: Thresholds) -> tuple[jax.Array, jax.Array]:
    """Sample tokens [G] from logits [G, V] and return the largest logits of the same pass.

    Both programs use this function, so that they sample alike.
    """
    warm = (rows.floats(Column.TEMPERATURE) > 0)[:, None]

    def greedy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return argmax(x), jnp.max(x, axis=1)

    def noisy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        heated = heated_and_cut(x, rows, thresholds) + gumbel(rows, x.shape[1])
        return argmax(jnp.where(warm, heated, x)), jnp.max(x, axis=1)

    drawn: tuple[jax.Array, jax.Array] = lax.cond(jnp.any(warm), noisy, greedy, x)
    return drawn


def heated_and_cut(x: jax.Array, rows: SamplingRows, thresholds: Thresholds = by_xla) -> jax.Array:
    """Return the logits [G, V] that a row's token is sampled from.

    Tokens cut by min-p, then top-k, then top-p are MASKED; ties at a threshold stay. Greedy rows are
    unchanged.
    """
    temperature = rows.floats(Column.TEMPERATURE)
    heated = x / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return jnp.where(x >= _threshold(x, rows, thresholds)[:, None], heated, MASKED)


def _threshold(x: jax.Array, rows: SamplingRows, thresholds: Thresholds) -> jax.Array:
    """Return the least logit [G] that is not cut, searched only if a row has a cut.

    It returns thresholds instead of logits because a branch would write those to memory.
    """
    temperature, min_p = rows.floats(Column.TEMPERATURE), rows.floats(Column.MIN_P)
    warm = temperature > 0
    options = Options(
        rate=LOG2_E / jnp.where(warm, temperature, 1.0),
        least=jnp.where(warm & (min_p > 0), temperature * jnp.log(min_p), -jnp.inf),
        top_k=jnp.where(warm, rows.ints(Column.TOP_K), 0).astype(jnp.float32),
        top_p=jnp.where(warm, rows.floats(Column.TOP_P), 1.0),
    )
    cuts = (options.top_k > 0) | (options.top_p < 1) | (options.least > -jnp.inf)
    none = jnp.full_like(temperature, -jnp.inf)
    threshold: jax.Array = lax.cond(jnp.any(cuts), lambda x: thresholds(x, options).threshold, lambda _: none, x)
    return jnp.where(cuts, threshold, none)


def draw_full(
    logits: jax.Array,  # [G, V] float32
    rows: SamplingRows,
    adjust: Adjust,
    counts: jax.Array,  # [slots, V] int16
    thresholds: Thresholds = by_xla,
    masks: jax.Array | None = None,  # [G, W] int32
    processed: jax.Array | None = None,  # [G, V] float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sample tokens with all parameters, and update the token counts.

    Returns tokens [G]; log-probabilities as packed by `logprobs_of` [G, 2 + 2 * MAX_LOGPROBS], zeros
    unless a row requests them; and the new counts.

    processed: the logits after logits processors; None: the server has none.

    The order is vLLM's: logits processors; masks; penalties, bias and bans; temperature; min-p; top-k; top-p.
    Log-probabilities are the model's, before all of these.
    """
    slots = counts.shape[0]
    history = rows.ints(Column.HISTORY)
    kept = jnp.where((history < slots)[:, None], counts[jnp.clip(history, 0, slots - 1)], 0)  # [G, V]
    x = logits if processed is None else processed
    x = x if masks is None else only_allowed(x, masks)
    x = _adjusted(_penalized(x, kept, rows), adjust)
    tokens, _ = _drawn(x, rows, thresholds)
    wanted = jnp.any(rows.ints(Column.LOGPROBS) > 0)
    none = jnp.zeros((tokens.shape[0], 2 + 2 * MAX_LOGPROBS), jnp.int32)
    packed = lax.cond(wanted, logprobs_of, lambda logits, tokens: none, logits, tokens)
    tokens = jnp.where(finite(logits if processed is None else x), tokens, BAD)
    old = kept[jnp.arange(tokens.shape[0]), jnp.clip(tokens, 0)]
    more = jnp.where((tokens >= 0) & (old & MOST_COUNTED < MOST_COUNTED), 1, 0).astype(counts.dtype)
    return tokens, packed, counts.at[history, jnp.clip(tokens, 0)].add(more, mode="drop")


def finite(logits: jax.Array) -> jax.Array:
    """Return whether each row's largest logit is finite [G]; NaN and +inf make it false."""
    return jnp.isfinite(jnp.max(logits, axis=-1))


def argmax(x: jax.Array) -> jax.Array:
    """Return the first index of the largest value of each row."""

    def at_once(x: jax.Array) -> jax.Array:
        return lax.argmax(x, 1, jnp.int32)

    def in_turn(x: jax.Array) -> jax.Array:
        best = jnp.max(x, axis=-1, keepdims=True)
        index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.minimum(jnp.min(jnp.where(x == best, index, x.shape[1]), axis=-1), x.shape[1] - 1)

    # On a CPU, XLA's argmax takes four times as long as two reductions; a GPU would write x between these.
    found: jax.Array = lax.platform_dependent(x, cuda=at_once, rocm=at_once, default=in_turn)
    return found


def gumbel(rows: SamplingRows, vocab: int) -> jax.Array:
    """Return standard Gumbel noise [G, V], a pure function of (seed, position, token).

    A counter goes twice through the finalizer of MurmurHash3. jax.random costs 3.6 ms for 32 x 4096
    on a CPU, more than half a step of the demo model; this costs 0.5 ms, and less to compile.
    """
    seed, high = rows.ints(Column.SEED).astype(jnp.uint32), rows.ints(Column.SEED_HIGH).astype(jnp.uint32)
    position = rows.ints(Column.POSITION).astype(jnp.uint32)
    first = _mix(seed ^ _mix(position + jnp.uint32(0x9E3779B9)))  # [G]
    second = _mix(high ^ _mix(first + jnp.uint32(0x7F4A7C15)))
    index = lax.broadcasted_iota(jnp.uint32, (seed.shape[0], vocab), 1)
    bits = _mix(_mix(index + first[:, None]) ^ second[:, None])
    # Small values, which give large noise, must keep all their bits: hence 1 - uniform and log1p.
    below = bits.astype(jnp.float32) * jnp.float32(2**-32) + jnp.float32(2**-33)
    return -jnp.log(-jnp.log1p(-jnp.minimum(below, jnp.float32(1 - 2**-24))))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _penalized(x: jax.Array, kept: jax.Array, rows: SamplingRows) -> jax.Array:
    drawn = (kept & MOST_COUNTED).astype(jnp.float32)  # [G, V]
    repetition = rows.floats(Column.REPETITION)[:, None]
    x = jnp.where(kept != 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - rows.floats(Column.FREQUENCY)[:, None] * drawn
    return x - rows.floats(Column.PRESENCE)[:, None] * (drawn > 0)


def _adjusted(x: jax.Array, adjust: Adjust) -> jax.Array:
    """Add the biases in blocks of columns, as many blocks as are in use: usually none."""
    row = lax.broadcasted_iota(jnp.int32, (x.shape[0], ADJUST_BLOCK), 0)

    def add(i: jax.Array, x: jax.Array) -> jax.Array:
        ids = lax.dynamic_slice_in_dim(adjust.ids, i * ADJUST_BLOCK, ADJUST_BLOCK, axis=1)
        values = lax.dynamic_slice_in_dim(adjust.values, i * ADJUST_BLOCK, ADJUST_BLOCK, axis=1)
        return x.at[row, ids].add(values, mode="drop")

    adjusted: jax.Array = lax.fori_loop(0, (adjust.used + ADJUST_BLOCK - 1) // ADJUST_BLOCK, add, x)
    return adjusted
