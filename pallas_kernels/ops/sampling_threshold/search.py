"""Find the lowest logit that top-k, top-p and min-p keep, without a sort; mostly in one pass over a row.

A row keeps `x >= threshold`, including ties at the threshold:

    min-p  x >= top + temperature * log(min_p)
    top-k  the highest b with count(x >= b) >= k
    top-p  the highest b with mass(x >= b) >= p * mass(what both keep),  mass = sum exp((x - top) / temperature)

A *sweep* reads all logits of a row once. Lane l of L holds tokens l, l + L, ...; a sweep catches
the DEPTH highest logits of each lane below a limit, which is infinity in the first sweep. Every
logit above the *floor*, the highest of the lanes' lowest caught logits, is therefore caught. A
threshold at or above the floor is found by bisection among the caught logits, without reading the
row again. This covers top-k for k up to about a hundred (of 50 logits, more than 4 fall into one of
512 lanes once in 600 rows), and top-p if as few tokens hold the mass.

Other thresholds take further sweeps. Each also sums what `MARKS` candidate thresholds near an
interpolated guess would keep, and catches the logits just below one of them. After `GUESSES` sweeps
the marks divide the remaining interval equally, so that even adversarial rows take about twenty
sweeps per threshold.

Two backends share the search: the kernel of `hopper.py`, where the state is of one row, and XLA
(`xla.py`), where it has a leading axis G. Logits of at most NOTHING, -inf among them, count as
absent.
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
HALF_STEP = 2**-24 * 1.0001  # relative: adding it to a number rounds to the next float32
SMALLEST = 1e-37  # step near zero
LOG2_E = 1.4426950408889634
# first marks while `low` is unknown: distances below `high`, relative to its size
FAR = (256.0, 16.0, 4.0, 1.0, 1 / 4, 1 / 16)
NEAR = (-1 / 8, -1 / 32, 1 / 32, 1 / 8)  # marks around the interpolated threshold, as fractions of the interval
CATCH = 3  # index of the mark below which a sweep catches


class Options(NamedTuple):
    """Sampling options of each row, float32: [G], or [] in the kernel."""

    rate: jax.Array  # log2(e) / temperature
    least: jax.Array  # distance below the top logit that min-p allows, <= 0; -inf: off
    top_k: jax.Array  # an integer; 0: off
    top_p: jax.Array  # >= 1: off


class Seen(NamedTuple):
    """What a sweep caught below its limit, and the count or mass at or above it."""

    limit: jax.Array
    above: jax.Array  # float32: a count or a mass, depending on the phase
    caught: tuple[jax.Array, ...]  # DEPTH x [(G,) L], descending


class Found(NamedTuple):
    """The threshold of each row and how often the row was swept: [G], or [] in the kernel."""

    threshold: jax.Array  # float32
    sweeps: jax.Array  # int32, the first one included


# (limit, marks, rate of the weights; 0 counts each as one) -> what was seen, and the sums at or above the marks
Sweep = Callable[[jax.Array, Sequence[jax.Array], jax.Array], tuple[Seen, list[jax.Array]]]
COUNT, WEIGH, DONE = 0, 1, 2  # phases of a row
UNKNOWN = -1.0  # a mass not known yet


class _State(NamedTuple):
    """Search for a threshold in [low, high): `low` keeps enough, `high` does not; done when they are adjacent."""

    phase: jax.Array  # int32
    low: jax.Array
    high: jax.Array
    at_low: jax.Array  # count or mass kept at `low`, as far as known
    at_high: jax.Array
    cut: jax.Array  # the lowest logit kept by min-p and, once found, top-k
    mass: jax.Array  # mass kept by `cut`
    seen: Seen
    turn: jax.Array  # sweeps in this phase
    sweeps: jax.Array


class _Row(NamedTuple):
    """What is known of a row after its first sweep."""

    options: Options
    top: jax.Array
    total: jax.Array  # mass of all logits
    vocab: int

    def rate(self, state: _State) -> jax.Array:
        """Return the rate of the weights 2 ** ((x - top) * rate); 0 while counting, so that all weights are 1."""
        return jnp.where(state.phase == COUNT, 0.0, self.options.rate)

    def weights(self, caught: Sequence[jax.Array], rate: jax.Array) -> list[jax.Array]:
        return [jnp.exp2((logits - wide(self.top)) * wide(rate)) for logits in caught]

    def wanted(self, state: _State) -> jax.Array:
        """Return the count or mass to keep. Check `_known` first: with UNKNOWN mass this is meaningless."""
        return jnp.where(state.phase == COUNT, self.options.top_k, self.options.top_p * state.mass)

    def finite(self) -> jax.Array:
        """Return whether the top logit is finite; false for NaN."""
        return jnp.abs(self.top) < -NOTHING


def after(x: jax.Array) -> jax.Array:
    """Return the next float32 above x, or SMALLEST more near zero, where floats are denser."""
    return x + jnp.maximum(jnp.abs(x) * HALF_STEP, SMALLEST)


def before(x: jax.Array) -> jax.Array:
    """Return the next number below x; see `after`."""
    return x - jnp.maximum(jnp.abs(x) * HALF_STEP, SMALLEST)


def wide(x: jax.Array) -> jax.Array:
    """Add an axis to broadcast over lanes."""
    return x[..., None] if x.ndim else x


def filled(like: jax.Array, value: float, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.full(like.shape, value, dtype) if like.ndim else jnp.asarray(value, dtype)


def insert(caught: Sequence[jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
    """Insert x into each lane of `caught`, dropping the lane's lowest."""
    kept = []
    for held in caught[:-1]:
        kept.append(jnp.maximum(held, x))
        x = jnp.minimum(held, x)
    return (*kept, jnp.maximum(caught[-1], x))


def search(
    top: jax.Array,
    total: jax.Array,
    caught: tuple[jax.Array, ...],
    options: Options,
    sweep: Sweep,
    vocab: int,
) -> Found:
    """Return the threshold of each row, given its top logit, the mass of all, and its first sweep's catch."""
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
    """Move rows whose threshold is found on to the next phase."""
    counted, options, seen = closed & (state.phase == COUNT), row.options, state.seen
    cut = jnp.maximum(state.cut, state.low)
    first = seen.limit > row.top
    caught = first & (jnp.max(seen.caught[-1], axis=-1) < cut)
    mass = jnp.where(caught, _kept(seen.caught, row.weights(seen.caught, options.rate), cut), UNKNOWN)
    mass = jnp.where(cut > NOTHING, mass, row.total)
    # The logits below the threshold hold at most 1 - p of the mass, which bounds how far below the top it lies.
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
        # What later sweeps of this phase saw is a count, which says nothing about mass.
        seen=seen._replace(above=jnp.where(counted & jnp.logical_not(first), jnp.inf, seen.above)),
        turn=jnp.where(counted, 0, state.turn),
    )


def _swept(row: _Row, state: _State, sweep: Sweep) -> _State:
    """Sweep the row again and narrow the interval by the marks."""
    marks, limit = _marks(state, row.wanted(state))
    lost = jnp.logical_not(_known(state))
    marks[0] = jnp.where(lost, state.cut, marks[0])
    fresh, sums = sweep(limit, marks, row.rate(state))
    state = state._replace(mass=jnp.where(lost, sums[0], state.mass), turn=state.turn + 1, sweeps=state.sweeps + 1)
    wanted = row.wanted(state)
    for mark, mass in zip(marks, sums, strict=True):
        inside = (state.low < mark) & (mark < state.high)
        enough, less = inside & (mass >= wanted), inside & (mass <= wanted)  # both: a valid threshold
        state = state._replace(
            low=jnp.where(enough, mark, state.low),
            at_low=jnp.where(enough, mass, state.at_low),
            high=jnp.where(less, mark, state.high),
            at_high=jnp.where(less, mass, state.at_high),
        )
    return state._replace(seen=fresh)


def _narrowed(row: _Row, state: _State) -> _State:
    """Narrow the interval by the caught logits."""
    seen, wanted = state.seen, row.wanted(state)
    weights = row.weights(seen.caught, row.rate(state))

    def kept(threshold: jax.Array) -> jax.Array:
        return seen.above + _kept(seen.caught, weights, threshold)

    floor = jnp.max(seen.caught[-1], axis=-1)
    # The threshold lies below this sweep's limit.
    use = (seen.above < wanted) & _open(state) & _known(state) & (floor < state.high) & (state.phase != DONE)
    whole = kept(floor) >= wanted
    low, high = jnp.where(whole, floor, NOTHING), jnp.where(whole, jnp.minimum(seen.limit, state.high), floor)
    low = jnp.maximum(low, jnp.minimum(state.low, high))
    high = jnp.where(use, high, low)

    def bisect(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = _middle(low, high)
        mass, left = kept(middle), after(low) < high
        high = jnp.where(left & (mass <= wanted), middle, high)  # both, if exactly what is wanted is kept
        return jnp.where(left & (mass >= wanted), middle, low), high

    low, _ = lax.while_loop(lambda ends: _any(after(ends[0]) < ends[1]), bisect, (low, high))
    low = jnp.maximum(low, state.low)
    partly = use & jnp.logical_not(whole)
    return state._replace(
        low=jnp.where(use, low, state.low),
        high=jnp.where(use, jnp.where(whole, low, after(floor)), state.high),
        at_high=jnp.where(partly, kept(after(floor)), state.at_high),
    )


def _marks(state: _State, wanted: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return the thresholds to try, and the limit below which to catch."""
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
    marks[-1] = jnp.where(first, marks[-1], before(high))  # finds a run of ties just below `high`
    return marks, limit


def _kept(caught: Sequence[jax.Array], weights: Sequence[jax.Array], threshold: jax.Array) -> jax.Array:
    """Return the weight of the caught logits at or above the threshold."""
    parts = [jnp.where(logits >= wide(threshold), weight, 0.0) for logits, weight in zip(caught, weights, strict=True)]
    return jnp.sum(reduce(jnp.add, parts), axis=-1)


def _middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return a number strictly between low and high, or `high` if there is none.

    Zero and its neighbor are tried first, because halving approaches them slowly.
    """
    middle = jnp.maximum(low / 2 + high / 2, after(low))
    middle = jnp.where((low < 0) & (high > 0), 0.0, middle)
    return jnp.where(low == 0, after(low), middle)


def _open(state: _State) -> jax.Array:
    return after(state.low) < state.high


def _any(rows: jax.Array) -> jax.Array:
    return jnp.any(rows) if rows.ndim else rows


def _chosen(use: jax.Array, new: _State, old: _State) -> _State:
    """Take `new` in the rows of `use`, so that a row's result does not depend on the others."""
    if not use.ndim:
        return new
    chosen: _State = jax.tree.map(lambda a, b: jnp.where(use if a.ndim == 1 else use[:, None], a, b), new, old)
    return chosen
