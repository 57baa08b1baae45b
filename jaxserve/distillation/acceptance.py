"""Acceptance rates of a draft model, computed from its and the target's distributions on held-out text.

At temperature 1 a token drafted from q is accepted with probability sum(min(p, q)) (Leviathan et al.,
arXiv 2211.17192, theorem 3.5); in greedy decoding it is accepted if both have the same best token. After
the first drafted token the context contains drafted tokens. Therefore the draft is rolled out, and
position j counts only if all tokens before it are accepted, with probability the product of
min(1, p(x) / q(x)) over these tokens x.

Letters: S rows, T tokens in a row, J drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxserve.distillation.samples import Sample
from jaxserve.distillation.teacher import Teacher
from jaxserve.models.layers import Tree
from jaxserve.training.loop import Params
from jaxserve.training.net import Net

ROWS = 8  # rows of a batch
PLACES = 8  # positions of an answer at which tokens are drafted
LEAST = 1e-9  # lower bound of the draft's probabilities

Pair = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class RollOut:
    """The acceptance of tokens that are drafted one after another."""

    anchors: int  # positions at which tokens were drafted
    survival: tuple[float, ...]  # by j: probability that token j and all before it are accepted

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The probability that token j is accepted, given that all before it are."""
        before = (1.0, *self.survival)
        return tuple(now / last if last else 0.0 for now, last in zip(self.survival, before, strict=False))

    def tokens_per_step(self, drafted: int) -> float:
        """Return the expected output tokens of a step that verifies `drafted` tokens: the accepted ones plus one."""
        return 1.0 + sum(self.survival[:drafted])


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The acceptance of a draft on held-out text."""

    positions: int
    overlap: float  # mean of sum(min(p, q)) at temperature 1
    agreement: float  # share of positions at which both have the same best token
    by_temperature: dict[str, tuple[int, float, float]]  # of the text -> (positions, overlap, agreement)
    sampled: RollOut  # at temperature 1, on the text with the temperature nearest to 1
    greedy: RollOut  # on the text with the lowest temperature

    def as_json(self) -> dict[str, Any]:
        """Return all fields and derived figures."""
        shown = asdict(self)
        for name, roll_out in (("sampled", self.sampled), ("greedy", self.greedy)):
            steps = [roll_out.tokens_per_step(k) for k in range(1, len(roll_out.survival) + 1)]
            shown[name] |= {"acceptance": roll_out.acceptance, "tokens_per_step": steps}
        return shown


def measure(
    teacher: Teacher, weights: Tree, rebuilt: Callable[[Params], Net], params: Params, samples: Sequence[Sample],
    *, drafted: int, seed: int = 0,
) -> Acceptance:  # fmt: skip
    """Compare draft and target on the answers in `samples`, and roll out `drafted` tokens at random positions."""
    measured = _Measured(teacher, rebuilt, drafted)
    sums: dict[float, npt.NDArray[np.float64]] = {}
    for batch, tokens in _batches(samples, drafted):
        both = np.stack(jax.device_get(measured.compare(weights, params, tokens)))  # [2, S, T]
        for at, sample in enumerate(batch):
            here = both[:, at, sample.asked - 1 : len(sample.tokens) - 1]
            more = np.array([here.shape[1], *here.sum(axis=1)], float)
            sums[sample.temperature] = sums.get(sample.temperature, np.zeros(3)) + more
    whole = sum(sums.values(), np.zeros(3))

    def means(sum: npt.NDArray[np.float64]) -> tuple[int, float, float]:
        return int(sum[0]), float(sum[1] / sum[0]), float(sum[2] / sum[0])

    temperatures = sorted(sums)
    warm = min(temperatures, key=lambda t: abs(t - 1.0))
    positions, overlap, agreement = means(whole)
    return Acceptance(
        positions=positions,
        overlap=overlap,
        agreement=agreement,
        by_temperature={f"{t:g}": means(sums[t]) for t in temperatures},
        sampled=measured.roll_out(weights, params, [s for s in samples if s.temperature == warm], False, seed),
        greedy=measured.roll_out(weights, params, [s for s in samples if s.temperature == temperatures[0]], True, seed),
    )


def _batches(samples: Sequence[Sample], room: int) -> list[tuple[Sequence[Sample], npt.NDArray[np.int32]]]:
    """Return the samples in batches of one shape [S, T], with `room` after the longest sample."""
    length = max(len(sample.tokens) for sample in samples) + room
    batches = []
    for first in range(0, len(samples), ROWS):
        batch = samples[first : first + ROWS]
        tokens = np.zeros((ROWS, length), np.int32)
        for row, entry in zip(tokens, batch, strict=False):
            row[: len(entry.tokens)] = entry.tokens
        batches.append((batch, tokens))
    return batches


class _Measured:
    """The programs that compare a draft with its target."""

    def __init__(self, teacher: Teacher, rebuilt: Callable[[Params], Net], drafted: int) -> None:
        self.teacher = teacher
        self.rebuilt = rebuilt
        self.drafted = drafted
        self.compare = jax.jit(self._compare)
        self._roll = jax.jit(self._rolled, static_argnames="greedy")

    def _compare(self, weights: Tree, params: Params, tokens: jax.Array) -> Pair:
        """Compute overlap and agreement at each position, [S, T] float32 each, for tokens [S, T]."""
        net = self.rebuilt(params)
        hidden = self.teacher.hidden(weights, tokens), net.hidden(tokens)

        def of_row(row: Pair) -> Pair:
            p, q = jax.nn.softmax(self.teacher.logits(weights, row[0])), jax.nn.softmax(net.logits(row[1]))
            same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
            return jnp.sum(jnp.minimum(p, q), axis=-1), same.astype(jnp.float32)

        both: Pair = jax.lax.map(of_row, hidden)
        return both

    def roll_out(
        self, weights: Tree, params: Params, samples: Sequence[Sample], greedy: bool, seed: int
    ) -> RollOut:  # fmt: skip
        """Roll out drafts at random positions of each sample's answer."""
        rng = np.random.default_rng(seed)
        survived = np.zeros(self.drafted)
        samples = [sample for sample in samples for _ in range(PLACES)]
        for number, (batch, tokens) in enumerate(_batches(samples, self.drafted)):
            known = np.ones(ROWS, np.int32)
            for at, entry in enumerate(batch):
                known[at] = rng.integers(entry.asked, len(entry.tokens))
            key = jax.random.fold_in(jax.random.key(seed), number)
            rows = np.asarray(self._roll(weights, params, tokens, known, key, greedy=greedy))
            survived += rows[: len(batch)].sum(axis=0)
        return RollOut(len(samples), tuple((survived / len(samples)).tolist()))

    def _rolled(
        self, weights: Tree, params: Params, tokens: jax.Array, known: jax.Array, key: jax.Array, greedy: bool
    ) -> jax.Array:
        """Compute survival [S, J] of drafts after the first `known` [S] tokens of `tokens` [S, T]."""
        net, rows = self.rebuilt(params), jnp.arange(tokens.shape[0])

        def extended(tokens: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            j, key = at
            logits = net.logits(net.hidden(tokens)[rows, known + j - 1])  # [S, V]
            drawn = jnp.argmax(logits, axis=-1) if greedy else jax.random.categorical(key, logits)
            return tokens.at[rows, known + j].set(drawn.astype(tokens.dtype)), logits

        steps = jnp.arange(self.drafted), jax.random.split(key, self.drafted)
        tokens, draft = jax.lax.scan(extended, tokens, steps)  # [J, S, V]
        places = known[:, None] + jnp.arange(self.drafted)[None, :]  # [S, J]
        x = jnp.take_along_axis(tokens, places, axis=1)
        hidden = jnp.take_along_axis(self.teacher.hidden(weights, tokens), (places - 1)[..., None], axis=1)
        target = jax.lax.map(lambda row: self.teacher.logits(weights, row), hidden)  # [S, J, V]
        if greedy:
            return jnp.cumprod((jnp.argmax(target, axis=-1) == x).astype(jnp.float32), axis=1)
        p, q = jax.nn.softmax(target), jax.nn.softmax(draft.transpose(1, 0, 2))
        p_x, q_x = (jnp.take_along_axis(distribution, x[..., None], axis=-1)[..., 0] for distribution in (p, q))
        before = jnp.cumprod(jnp.minimum(1.0, p_x / jnp.maximum(q_x, LEAST)), axis=1)
        before = jnp.concatenate([jnp.ones_like(before[:, :1]), before[:, :-1]], axis=1)
        return before * jnp.sum(jnp.minimum(p, q), axis=-1)  # the expectation over token j has less variance
