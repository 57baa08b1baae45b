"""Speculative decoding on the device: verification of drafted tokens, and n-gram drafts.

A row's span is its last token and the tokens drafted after it, so a step computes the target's
logits at each of them. Two verifications:

- `strict` samples every position as without a draft, with the noise of that position, and accepts
  drafted tokens while they agree. The output equals that without speculation, also for sampled
  tokens (drafter-invariant speculative decoding, arXiv 2408.07978).
- `probabilistic` is the rejection sampling of arXiv 2211.17192. It accepts more of a sampled draft;
  the output has the same distribution, but other tokens.

For deterministic drafts (an n-gram, a greedy row) both accept the same tokens.

Letters: G sampling rows, D tokens of a row that are verified (1 + drafted), V vocabulary, S rows,
L positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.engine.programs.sampling import (
    BAD,
    Column,
    SamplingRows,
    argmax,
    draw,
    finite,
    gumbel,
    heated_and_cut,
)
from pallas_kernels.ops.sampling_threshold.api import Thresholds
from pallas_kernels.ops.sampling_threshold.xla import thresholds as by_xla

NONE = -2  # in place of a token that a row did not gain
JUDGED, GUESSED = 0x5EED0001, 0x5EED0002  # salts of the noise that accepts a drafted token, and that drafts one
UNKNOWN = -1  # in place of a token that a history does not have yet


def repeated(packed: jax.Array, times: int) -> SamplingRows:
    """Expand rows [G] to SamplingRows [G * D] with the next D positions of each."""
    rows = jnp.repeat(packed, times, axis=0)
    ahead = jnp.tile(jnp.arange(times, dtype=jnp.int32), packed.shape[0])
    return SamplingRows(rows.at[:, Column.POSITION].add(ahead))


def strict(
    logits: jax.Array, packed: jax.Array, draft: jax.Array, lengths: jax.Array, thresholds: Thresholds = by_xla
) -> jax.Array:
    """Verify drafts exactly: return the tokens [G, D] that rows gain, then NONE; BAD if not finite.

    logits [G * D, V]; packed [G, len(Column)], POSITION that of the first token to sample; draft
    [G, D - 1], of which the first `lengths` [G] are valid.
    """
    width, times = packed.shape[0], 1 + draft.shape[1]
    drawn = draw(logits, repeated(packed, times), thresholds).reshape(width, times)
    right = (drawn[:, :-1] == draft) & (jnp.arange(times - 1)[None] < lengths[:, None])
    return gained(drawn, _leading(right))


def probabilistic(
    logits: jax.Array,
    packed: jax.Array,
    draft: jax.Array,
    lengths: jax.Array,
    scores: jax.Array,
    thresholds: Thresholds = by_xla,
) -> jax.Array:
    """Verify drafts by rejection sampling (arXiv 2211.17192, Algorithm 1); returns as `strict` does.

    A drafted token is accepted with probability min(1, p / q). After a rejection, the row's token is
    sampled from the normalized max(0, p - q).

    scores [G, D - 1, V]: the draft model's raw logits for the drafted tokens. Greedy rows accept the
    best token. The noise at a position depends on the request's seed, the position, and the draft.
    """
    width, times = packed.shape[0], 1 + draft.shape[1]
    told = repeated(packed, times)
    theirs = jnp.pad(scores, ((0, 0), (0, 1), (0, 0))).reshape(logits.shape)
    mine, guessed = (jax.nn.softmax(heated_and_cut(one, told, thresholds)) for one in (logits, theirs))
    tokens = jnp.pad(draft, ((0, 0), (0, 1))).reshape(-1, 1)
    p, q = (jnp.take_along_axis(one, tokens, axis=1)[:, 0] for one in (mine, guessed))
    drafted = (jnp.arange(times)[None] < lengths[:, None]).reshape(-1)
    kept = drafted & (uniform(told) * q < p)
    more = jnp.where(drafted[:, None], jnp.maximum(mine - guessed, 0.0), mine)
    drawn = argmax(jnp.where(more > 0, jnp.log(more) + gumbel(told, logits.shape[1]), -jnp.inf))
    best = argmax(logits)
    warm = told.floats(Column.TEMPERATURE) > 0
    right = jnp.where(warm, kept, drafted & (best == tokens[:, 0]))
    chosen = jnp.where(right, tokens[:, 0], jnp.where(warm, drawn, best))
    chosen = jnp.where(finite(logits), chosen, BAD).reshape(width, times)
    right = right & finite(logits)
    return gained(chosen, _leading(right.reshape(width, times)[:, :-1]))


def uniform(told: SamplingRows) -> jax.Array:
    """Return uniform noise [G] in [0, 1) by seed and position, independent of their `gumbel`."""
    noise = gumbel(salted(told, JUDGED), 1)[:, 0]
    return jnp.exp(-jnp.exp(-noise))


def salted(told: SamplingRows, salt: int) -> SamplingRows:
    """Return rows with independent noise, selected by `salt`."""
    return SamplingRows(told.packed.at[:, Column.SEED_HIGH].set(told.ints(Column.SEED_HIGH) ^ jnp.int32(salt)))


def _leading(right: jax.Array) -> jax.Array:
    """Return the number of leading true values of each row of [G, D - 1], [G]."""
    return jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)


def gained(drawn: jax.Array, accepted: jax.Array) -> jax.Array:
    """Keep the first `accepted` [G] tokens of each row [G, D], and one more."""
    return jnp.where(jnp.arange(drawn.shape[1])[None] <= accepted[:, None], drawn, NONE)


def ngram(history: jax.Array, known: jax.Array, count: int, *, least: int, most: int) -> jax.Array:
    """Draft by prompt lookup: return what followed the longest repeated suffix, [S, count].

    The suffix has `least` to `most` tokens (`prompt_lookup_min`, `prompt_lookup_max`); of equally
    long matches the first counts. history [S, L], of which the first `known` [S] tokens are valid. A
    continuation that reaches the end of the text repeats. If no suffix matches, the last token
    repeats.
    """
    length = history.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    last = known[:, None] - 1
    run, matches = jnp.zeros(history.shape, jnp.int32), index < last
    for back in range(most):
        suffix = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)  # [S, 1]
        before = jnp.roll(history, back, axis=1)  # the token `back` positions before each
        matches = matches & (before == suffix) & (index >= back) & (last >= back)
        run = run + matches
    longest = jnp.max(run, axis=1, keepdims=True)
    first = jnp.min(jnp.where(run == longest, index, length), axis=1, keepdims=True)
    begin = jnp.where(longest >= least, first + 1, last)  # [S, 1]
    period = jnp.maximum(last + 1 - begin, 1)
    follows = begin + jnp.arange(count, dtype=jnp.int32)[None] % period
    return jnp.take_along_axis(history, jnp.clip(follows, 0, length - 1), axis=1)


def noted(history: jax.Array, told: SamplingRows, tokens: jax.Array) -> jax.Array:
    """Write tokens [G, D] to their positions in history [slots, L]; NONE and BAD are dropped."""
    if not history.shape[1]:
        return history
    positions = told.ints(Column.POSITION)[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(tokens > BAD, positions, history.shape[1])
    return history.at[told.ints(Column.SLOT)[:, None], positions].set(tokens, mode="drop")


def last_of(tokens: jax.Array) -> jax.Array:
    """Return the last token that each row of [G, D] gained."""
    count = jnp.sum(tokens != NONE, axis=1, keepdims=True)
    last: jax.Array = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0), axis=1)[:, 0]
    return last
