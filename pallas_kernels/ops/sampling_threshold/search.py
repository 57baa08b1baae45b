"""The lowest logit that top-k, top-p and min-p leave in, without a sort: mostly by one look at a row.

What is kept of a row is `x >= threshold`, ties at the threshold included:

    min-p  x >= top + temperature * log(min_p)
    top-k  the highest b with count(x >= b) >= k
    top-p  the highest b with mass(x >= b) >= p * mass(what both keep),  mass = sum exp((x - top) / temperature)

A *sweep* looks at all logits of a row once. Lane l of L has the tokens l, l + L, ...; a sweep catches the DEPTH highest
of each lane below a limit, the first one below infinity. So everything above the highest of the lowest caught, the
*floor*, is caught, and a threshold at or above it is found among what was caught, by bisection, with no logit read
again: top-k for k up to about a hundred (of 50 logits, 4 fall into one of 512 lanes once in 600 rows), and top-p where
as few tokens have the mass. Other thresholds are searched by further sweeps. Each also adds up what `MARKS` thresholds
would keep, near to where interpolation expects the threshold, and catches what lies just below one of them. After
`GUESSES` of them the marks cut what is left into equal parts, so that even rows made to deceive take some twenty sweeps
for a threshold.

One search, two users: the kernel of `hopper.py`, whose state is of one row, and XLA (`xla.py`), with a
leading axis G. Logits of NOTHING and less, -inf among them, count as not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DEPTH, MARKS, GUESSES = 4, 6, 6
NOTHING = -1e30
HALF_STEP = 2**-24 * 1.0001  # of a number: added to it, it rounds to the next one
SMALLEST = 1e-37  # step around zero
LOG2_E = 1.4426950408889634
FAR = (256.0, 16.0, 4.0, 1.0, 1 / 4, 1 / 16)  # marks below `high`, in its size, where nothing is known below it
NEAR = (-1 / 8, -1 / 32, 1 / 32, 1 / 8)  # marks around the threshold that is expected, in parts of what is left
CATCH = 3  # the mark below which a sweep catches


class Options(NamedTuple):
    """Of each row, float32: [G], or [] in the kernel."""

    rate: jax.Array  # log2(e) / temperature
    least: jax.Array  # what min-p allows to lie below the best, <= 0; -inf: off
    top_k: jax.Array  # a whole number; 0: off
    top_p: jax.Array  # >= 1: off


class Seen(NamedTuple):
    """What a sweep saw below its limit, and how much lies at or above it."""

    limit: jax.Array
    above: jax.Array  # float32: count or mass, as the phase has it
    caught: tuple[jax.Array, ...]  # DEPTH x [(G,) L], falling


class Found(NamedTuple):
    threshold: jax.Array  # float32
    sweeps: jax.Array  # int32, the first one included


# Of a limit, marks, and the rate of weights (0: each counts as one): sums at or above the marks.
Sweep = Callable[[jax.Array, Sequence[jax.Array], jax.Array], tuple[Seen, list[jax.Array]]]
COUNT, WEIGH, DONE = 0, 1, 2  # phases of a row
UNKNOWN = -1.0  # a mass


class _State(NamedTuple):
    """A threshold in [low, high), `low` where no number lies between: `low` keeps enough, `high` does not."""

    phase: jax.Array  # int32
    low: jax.Array
    high: jax.Array
    at_low: jax.Array  # what is kept there, as far as known
    at_high: jax.Array
    cut: jax.Array  # what min-p and, once it is found, top-k keep at least
    mass: jax.Array  # of that
    seen: Seen
    turn: jax.Array  # sweeps of this phase
    sweeps: jax.Array


class _Row(NamedTuple):
    """What is known of a row once its first sweep is done."""

    options: Options
    top: jax.Array
    total: jax.Array  # mass of all
    vocab: int

    def rate(self, state: _State) -> jax.Array:
        """Of weights 2 ** ((x - top) * rate): all are one where they are counted."""
        return jnp.where(state.phase == COUNT, 0.0, self.options.rate)

    def weights(self, caught: Sequence[jax.Array], rate: jax.Array) -> list[jax.Array]:
        return [jnp.exp2((one - wide(self.top)) * wide(rate)) for one in caught]

    def wanted(self, state: _State) -> jax.Array:
        """Count or mass; nothing is at least UNKNOWN times any share, so ask `_known` first."""
        return jnp.where(state.phase == COUNT, self.options.top_k, self.options.top_p * state.mass)

    def finite(self) -> jax.Array:
        """Not so of NaN."""
        return jnp.abs(self.top) < -NOTHING


def after(x: jax.Array) -> jax.Array:
    """The next number; SMALLEST further where numbers lie closer than that, around zero."""
    return x + jnp.maximum(jnp.abs(x) * HALF_STEP, SMALLEST)


def before(x: jax.Array) -> jax.Array:
    """The number before, as in `after`."""
    return x - jnp.maximum(jnp.abs(x) * HALF_STEP, SMALLEST)


def wide(x: jax.Array) -> jax.Array:
    """To be held against lanes."""
    return x[..., None] if x.ndim else x


def filled(like: jax.Array, value: float, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.full(like.shape, value, dtype) if like.ndim else jnp.asarray(value, dtype)


def insert(caught: Sequence[jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
    """`caught` with each lane's x, the lowest of them dropped."""
    kept = []
    for one in caught[:-1]:
        kept.append(jnp.maximum(one, x))
        x = jnp.minimum(one, x)
    return (*kept, jnp.maximum(caught[-1], x))


def search(
    top: jax.Array,
    total: jax.Array,
    caught: tuple[jax.Array, ...],
    options: Options,
    sweep: Sweep,
    vocab: int,
) -> Found:
    """The threshold of each row, from its best logit, the mass of all, and what its first sweep caught."""
    row, zero, whole = _Row(options, top, total, vocab), filled(top, 0), filled(top, 0, jnp.int32)
    seen = Seen(after(top), zero, caught)
    cut = jnp.maximum(top + options.least, NOTHING)
    high = jnp.where((options.top_k > 0) & row.finite(), after(top), NOTHING)
    low, all_ = filled(top, NOTHING), filled(top, vocab)
    state = _State(whole, low, high, all_, zero, cut, filled(top, UNKNOWN), seen, whole, filled(top, 1, jnp.int32))

    def step(state: _State) -> _State:
        state = _narrowed(row, state)
        closed = jnp.logical_not(_open(state))
        state = _advanced(row, state, closed)
        asks = jnp.logical_not(closed) & (state.phase != DONE)
        done: _State = lax.cond(_any(asks), lambda: _chosen(asks, _swept(row, state, sweep), state), lambda: state)
        return done

    done: _State = lax.while_loop(lambda state: _any(state.phase != DONE), step, state)
    return Found(jnp.maximum(done.cut, done.low), done.sweeps)


def _known(state: _State) -> jax.Array:
    return (state.phase == COUNT) | (state.mass >= 0)


def _advanced(row: _Row, state: _State, closed: jax.Array) -> _State:
    """The next phase, of rows whose threshold is found."""
    counted, options, seen = closed & (state.phase == COUNT), row.options, state.seen
    cut = jnp.maximum(state.cut, state.low)
    first = seen.limit > row.top
    caught = first & (jnp.max(seen.caught[-1], axis=-1) < cut)
    mass = jnp.where(caught, _kept(seen.caught, row.weights(seen.caught, options.rate), cut), UNKNOWN)
    mass = jnp.where(cut > NOTHING, mass, row.total)
    # All logits below the threshold have at most a share 1 - p of the mass, so it lies less than this below the best.
    few = jnp.maximum((1.0 - options.top_p) * mass, 1e-30)
    far = jnp.where(mass > 0, row.top - (jnp.log2(row.vocab / few) + 2.0) / options.rate, NOTHING)
    weighed = (options.top_p < 1) & row.finite()
    low = jnp.where(weighed, jnp.maximum(cut, far), cut)
    return state._replace(
        phase=jnp.where(closed, jnp.minimum(state.phase + 1, DONE), state.phase),
        low=jnp.where(counted, low, state.low),
        high=jnp.where(counted, jnp.where(weighed, after(row.top), low), state.high),
        at_low=jnp.where(counted, jnp.where(mass > 0, mass, row.total), state.at_low),
        at_high=jnp.where(counted, 0.0, state.at_high),
        cut=jnp.where(counted, cut, state.cut),
        mass=jnp.where(counted, mass, state.mass),
        # What a later sweep saw was counted, and is of no use to weigh.
        seen=seen._replace(above=jnp.where(counted & jnp.logical_not(first), jnp.inf, seen.above)),
        turn=jnp.where(counted, 0, state.turn),
    )


def _swept(row: _Row, state: _State, sweep: Sweep) -> _State:
    """The state after another look at the row."""
    marks, limit = _marks(state, row.wanted(state))
    lost = jnp.logical_not(_known(state))
    marks[0] = jnp.where(lost, state.cut, marks[0])
    fresh, sums = sweep(limit, marks, row.rate(state))
    state = state._replace(mass=jnp.where(lost, sums[0], state.mass), turn=state.turn + 1, sweeps=state.sweeps + 1)
    wanted = row.wanted(state)
    for mark, found in zip(marks, sums, strict=True):
        inside = (state.low < mark) & (mark < state.high)
        enough, less = inside & (found >= wanted), inside & (found <= wanted)  # both: a threshold, though no logit
        state = state._replace(
            low=jnp.where(enough, mark, state.low),
            at_low=jnp.where(enough, found, state.at_low),
            high=jnp.where(less, mark, state.high),
            at_high=jnp.where(less, found, state.at_high),
        )
    return state._replace(seen=fresh)


def _narrowed(row: _Row, state: _State) -> _State:
    """The state knowing what was caught."""
    seen, wanted = state.seen, row.wanted(state)
    weights = row.weights(seen.caught, row.rate(state))

    def kept(threshold: jax.Array) -> jax.Array:
        return seen.above + _kept(seen.caught, weights, threshold)

    floor = jnp.max(seen.caught[-1], axis=-1)
    # What is wanted lies below the limit, and this sweep saw where.
    use = (seen.above < wanted) & _open(state) & _known(state) & (floor < state.high) & (state.phase != DONE)
    whole = kept(floor) >= wanted
    low, high = jnp.where(whole, floor, NOTHING), jnp.where(whole, jnp.minimum(seen.limit, state.high), floor)
    low = jnp.maximum(low, jnp.minimum(state.low, high))
    high = jnp.where(use, high, low)

    def bisect(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = _middle(low, high)
        found, left = kept(middle), after(low) < high
        high = jnp.where(left & (found <= wanted), middle, high)  # both, where it is just what is wanted
        return jnp.where(left & (found >= wanted), middle, low), high

    low, _ = lax.while_loop(lambda ends: _any(after(ends[0]) < ends[1]), bisect, (low, high))
    low = jnp.maximum(low, state.low)
    partly = use & jnp.logical_not(whole)
    return state._replace(
        low=jnp.where(use, low, state.low),
        high=jnp.where(use, jnp.where(whole, low, after(floor)), state.high),
        at_high=jnp.where(partly, kept(after(floor)), state.at_high),
    )


def _marks(state: _State, wanted: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Thresholds to try, and the one below which to catch."""
    low, high, turn = state.low, state.high, state.turn
    width = high - low
    share = (state.at_low - wanted) / jnp.maximum(state.at_low - state.at_high, 1e-30)
    expected = low + width * jnp.minimum(jnp.maximum(share, 0.0), 1.0)
    near = [expected + width * part for part in NEAR]
    guesses = [(low + near[0]) / 2, *near, (near[-1] + high) / 2]
    first, guess = turn == 0, (turn > 0) & (turn < GUESSES)
    size = jnp.maximum(jnp.abs(high), 1.0)
    marks = []
    for n, (guessed, far) in enumerate(zip(guesses, FAR, strict=True), 1):
        mark = jnp.where(guess, guessed, low + width * (n / (MARKS + 1)))
        mark = jnp.where(low <= NOTHING, high - size * far, mark)
        marks.append(jnp.minimum(jnp.maximum(mark, after(low)), high))
    limit = jnp.where(first | (turn >= 3), high, marks[CATCH])
    marks[-1] = jnp.where(first, marks[-1], before(high))  # many are alike, and this is what they are
    return marks, limit


def _kept(caught: Sequence[jax.Array], weights: Sequence[jax.Array], threshold: jax.Array) -> jax.Array:
    """Weight of what was caught at or above the threshold."""
    parts = [jnp.where(one >= wide(threshold), weight, 0.0) for one, weight in zip(caught, weights, strict=True)]
    return jnp.sum(reduce(jnp.add, parts), axis=-1)


def _middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """A number between, or `high` where there is none. Zero, which halves come to late, and its neighbour are first."""
    middle = jnp.maximum(low / 2 + high / 2, after(low))
    middle = jnp.where((low < 0) & (high > 0), 0.0, middle)
    return jnp.where(low == 0, after(low), middle)


def _open(state: _State) -> jax.Array:
    return after(state.low) < state.high


def _any(rows: jax.Array) -> jax.Array:
    return jnp.any(rows) if rows.ndim else rows


def _chosen(use: jax.Array, new: _State, old: _State) -> _State:
    """`new` of the rows in `use`: a row's result is that of the row alone."""
    if not use.ndim:
        return new
    chosen: _State = jax.tree.map(lambda a, b: jnp.where(use if a.ndim == 1 else use[:, None], a, b), new, old)
    return chosen
