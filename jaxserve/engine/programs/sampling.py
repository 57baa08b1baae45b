"""Drawing tokens on the device. A token depends on its logits, its request's parameters and seed, and its position:
never on the batch, the row, the schedule or the mesh.

Two programs: `draw` knows temperature, top-k, top-p and min-p, `draw_full` knows everything. On rows that use nothing
else both give the same tokens. Letters: G sampling rows, V vocabulary, A adjusted tokens of a row.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.engine.programs.logprobs import logprobs_of
from jaxserve.sched.api.params import MAX_LOGPROBS
from pallas_kernels.ops.sampling_threshold.api import Thresholds, XlaThresholds
from pallas_kernels.ops.sampling_threshold.search import LOG2_E, Options

BAD = -1  # in place of a token where the logits are not finite
SEEN_IN_PROMPT = 1 << 14  # in a count: the token is in the prompt; below it, how often it was drawn
MOST_COUNTED = SEEN_IN_PROMPT - 1
MASKED = -1e30
ADJUSTED = 512  # A: 300 biases and 212 banned ids
ADJUST_BLOCK = 32
BY_XLA = XlaThresholds()


class Column(IntEnum):
    """What the host tells of each sampling row, one int32 each; floats as their bits."""

    SLOT = 0  # row of the carry; out of range for padding
    POSITION = 1  # of the token to draw
    SEED = 2
    SEED_HIGH = 3
    TEMPERATURE = 4  # float; 0 is greedy
    TOP_K = 5  # 0: off
    TOP_P = 6  # float
    MIN_P = 7  # float
    REPETITION = 8  # float
    PRESENCE = 9  # float
    FREQUENCY = 10  # float
    HISTORY = 11  # slot whose token counts the row keeps; out of range: none
    LOGPROBS = 12  # 1: wanted


class SamplingRows(NamedTuple):
    """The columns of a step, [G] each."""

    packed: jax.Array  # [G, len(Column)] int32

    def ints(self, column: Column) -> jax.Array:
        return self.packed[:, column]

    def floats(self, column: Column) -> jax.Array:
        return lax.bitcast_convert_type(self.packed[:, column], jnp.float32)


class Adjust(NamedTuple):
    """Logit bias and banned tokens of each row; ids out of range are padding."""

    ids: jax.Array  # [G, A] int32
    values: jax.Array  # [G, A] float32, added; -inf bans
    used: jax.Array  # [] int32, columns in use in any row


def draw(logits: jax.Array, rows: SamplingRows, thresholds: Thresholds = BY_XLA) -> jax.Array:
    """Tokens [G] int32 by temperature, min-p, top-k and top-p, BAD where a row's logits are not finite.
    logits: [G, V] float32."""
    tokens, top = _drawn(logits, rows, thresholds)
    return jnp.where(jnp.isfinite(top), tokens, BAD)


def _drawn(x: jax.Array, rows: SamplingRows, thresholds: Thresholds) -> tuple[jax.Array, jax.Array]:
    """Tokens [G] of logits [G, V], and the largest of these, found by the same look. Each way to draw asks here, so all
    draw alike."""
    warm = (rows.floats(Column.TEMPERATURE) > 0)[:, None]

    def greedy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return argmax(x), jnp.max(x, axis=1)

    def noisy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        heated = heated_and_cut(x, rows, thresholds) + gumbel(rows, x.shape[1])
        return argmax(jnp.where(warm, heated, x)), jnp.max(x, axis=1)

    drawn: tuple[jax.Array, jax.Array] = lax.cond(jnp.any(warm), noisy, greedy, x)
    return drawn


def heated_and_cut(x: jax.Array, rows: SamplingRows, thresholds: Thresholds = BY_XLA) -> jax.Array:
    """Logits [G, V] whose softmax is what a row's token is drawn from; MASKED where a cut leaves a token out: min-p,
    then top-k, then top-p. Ties at a threshold stay in. Greedy rows are left as they are."""
    temperature = rows.floats(Column.TEMPERATURE)
    heated = x / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return jnp.where(x >= _threshold(x, rows, thresholds)[:, None], heated, MASKED)


def _threshold(x: jax.Array, rows: SamplingRows, thresholds: Thresholds) -> jax.Array:
    """The least logit [G] that is left in. Searched where some row asks for a cut; its result is [G], because a branch
    that returned logits would write them, for another kernel to read."""
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
    thresholds: Thresholds = BY_XLA,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [G], their log-probabilities packed as `logprobs_of` [G, 2 + 2 * MAX_LOGPROBS], nothing there unless some
    row wants them, and the new counts.

    In the order of vLLM: penalties, bias and bans; temperature; min-p; top-k; top-p. Log-probabilities are those of
    the model, before any of it.
    """
    slots = counts.shape[0]
    history = rows.ints(Column.HISTORY)
    kept = jnp.where((history < slots)[:, None], counts[jnp.clip(history, 0, slots - 1)], 0)  # [G, V]
    x = _adjusted(_penalised(logits, kept, rows), adjust)
    tokens, _ = _drawn(x, rows, thresholds)
    wanted = jnp.any(rows.ints(Column.LOGPROBS) > 0)
    none = jnp.zeros((tokens.shape[0], 2 + 2 * MAX_LOGPROBS), jnp.int32)
    packed = lax.cond(wanted, logprobs_of, lambda logits, tokens: none, logits, tokens)
    tokens = jnp.where(finite(logits), tokens, BAD)
    old = kept[jnp.arange(tokens.shape[0]), jnp.clip(tokens, 0)]
    more = jnp.where((tokens >= 0) & (old & MOST_COUNTED < MOST_COUNTED), 1, 0).astype(counts.dtype)
    return tokens, packed, counts.at[history, jnp.clip(tokens, 0)].add(more, mode="drop")


def finite(logits: jax.Array) -> jax.Array:
    """SamplingRows [G] whose largest logit is a number; NaN anywhere, or +inf, makes it none."""
    return jnp.isfinite(jnp.max(logits, axis=-1))


def argmax(x: jax.Array) -> jax.Array:
    """First index of the largest of each row."""

    def at_once(x: jax.Array) -> jax.Array:
        return lax.argmax(x, 1, jnp.int32)

    def in_turn(x: jax.Array) -> jax.Array:
        best = jnp.max(x, axis=-1, keepdims=True)
        index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.minimum(jnp.min(jnp.where(x == best, index, x.shape[1]), axis=-1), x.shape[1] - 1)

    # On a CPU XLA's own takes four times as long as two plain reductions; a GPU would write x for the second to read.
    found: jax.Array = lax.platform_dependent(x, cuda=at_once, rocm=at_once, default=in_turn)
    return found


def gumbel(rows: SamplingRows, vocab: int) -> jax.Array:
    """Standard Gumbel noise [G, V], a pure function of (seed, position, token).

    A counter through the finaliser of MurmurHash3, twice. jax.random costs 3.6 ms for 32 x 4096 on a CPU, more than
    half a step of the demo model; this costs 0.5 ms, and less to compile.
    """
    seed, high = rows.ints(Column.SEED).astype(jnp.uint32), rows.ints(Column.SEED_HIGH).astype(jnp.uint32)
    position = rows.ints(Column.POSITION).astype(jnp.uint32)
    first = _mix(seed ^ _mix(position + jnp.uint32(0x9E3779B9)))  # [G]
    second = _mix(high ^ _mix(first + jnp.uint32(0x7F4A7C15)))
    index = lax.broadcasted_iota(jnp.uint32, (seed.shape[0], vocab), 1)
    bits = _mix(_mix(index + first[:, None]) ^ second[:, None])
    # Small values, which give large noise, keep all their bits: 1 - uniform, hence log1p.
    below = bits.astype(jnp.float32) * jnp.float32(2**-32) + jnp.float32(2**-33)
    return -jnp.log(-jnp.log1p(-jnp.minimum(below, jnp.float32(1 - 2**-24))))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _penalised(x: jax.Array, kept: jax.Array, rows: SamplingRows) -> jax.Array:
    drawn = (kept & MOST_COUNTED).astype(jnp.float32)  # [G, V]
    repetition = rows.floats(Column.REPETITION)[:, None]
    x = jnp.where(kept != 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - rows.floats(Column.FREQUENCY)[:, None] * drawn
    return x - rows.floats(Column.PRESENCE)[:, None] * (drawn > 0)


def _adjusted(x: jax.Array, adjust: Adjust) -> jax.Array:
    """Add the biases, in blocks of columns, as many as are in use: usually none."""
    row = lax.broadcasted_iota(jnp.int32, (x.shape[0], ADJUST_BLOCK), 0)

    def add(i: jax.Array, x: jax.Array) -> jax.Array:
        ids = lax.dynamic_slice_in_dim(adjust.ids, i * ADJUST_BLOCK, ADJUST_BLOCK, axis=1)
        values = lax.dynamic_slice_in_dim(adjust.values, i * ADJUST_BLOCK, ADJUST_BLOCK, axis=1)
        return x.at[row, ids].add(values, mode="drop")

    adjusted: jax.Array = lax.fori_loop(0, (adjust.used + ADJUST_BLOCK - 1) // ADJUST_BLOCK, add, x)
    return adjusted
