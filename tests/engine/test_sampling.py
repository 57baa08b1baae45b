"""Sampling on the device against plain numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.engine.programs import sampling
from jaxserve.engine.programs.inputs import SlotTable, banned, check_adjusted
from jaxserve.engine.programs.logprobs import CHUNK, best, logprobs_of
from jaxserve.engine.programs.sampling import (
    ADJUSTED,
    BAD,
    MASKED,
    MOST_COUNTED,
    SEEN_IN_PROMPT,
    Adjust,
    SamplingRows,
    argmax,
    gumbel,
)
from jaxserve.engine.runtime.results import unpack
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Begin
from tests.support.engine.statistics import DRAWS, LIMITS, V, table

draw, draw_full = jax.jit(sampling.draw), jax.jit(sampling.draw_full)
LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2
HISTORY = np.array([3, 3, 3, 7, 9], np.int64)  # earlier output tokens
PROMPT = np.array([1, 3, 12], np.int64)

Array = npt.NDArray[Any]


def counts() -> jax.Array:
    row = np.bincount(HISTORY, minlength=V)
    row[PROMPT] |= SEEN_IN_PROMPT
    made = np.zeros((4, V), np.int16)
    made[2] = row
    return jnp.asarray(made)


def plain_adjust(draws: int) -> Adjust:
    return Adjust(
        jnp.full((draws, ADJUSTED), V, jnp.int32), jnp.zeros((draws, ADJUSTED), jnp.float32), jnp.asarray(0, jnp.int32)
    )


def reference(params: SamplingParams, logits: Array = LOGITS) -> Array:
    """Return the probability of each token, in the order of vLLM. Ties with the last kept token are kept."""
    x = logits.astype(np.float64)
    drawn = np.bincount(HISTORY, minlength=V)
    seen = (drawn > 0) | np.isin(np.arange(V), PROMPT)
    x = np.where(seen, np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
    x = x - params.frequency_penalty * drawn - params.presence_penalty * (drawn > 0)
    for token, bias in params.logit_bias:
        x[token] += bias
    x = x / params.temperature
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    p[p < params.min_p * p.max()] = 0
    if params.top_k > 0:
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    kept = np.cumsum(p[order]) - p[order] < params.top_p
    p[p < p[order[kept]].min()] = 0
    return p / p.sum()


TIED = np.round(LOGITS)  # seven values, twenty-four tokens


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (LOGITS, {"temperature": 1.0}),
        (LOGITS, {"temperature": 0.6, "top_k": 5}),
        (LOGITS, {"temperature": 1.5, "top_p": 0.8}),
        (LOGITS, {"temperature": 1.2, "min_p": 0.1}),
        (LOGITS, {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02}),
        (LOGITS, {"temperature": 1.0, "repetition_penalty": 1.7}),
        (LOGITS, {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.4}),
        (LOGITS, {"repetition_penalty": 0.8, "top_p": 0.95, "logit_bias": ((5, 2.0), (6, -100.0))}),
        # Ties at the threshold.
        (TIED, {"top_k": 4}),
        (TIED, {"top_k": 1}),
        (TIED, {"top_p": 0.55}),
        (TIED, {"top_k": 7, "top_p": 0.6}),
        (TIED, {"top_k": 7, "top_p": 0.99}),
    ],
    ids=lambda given: "-".join(f"{name}{value}" for name, value in given.items()) if isinstance(given, dict) else "",
)
def test_samples_follow_the_distribution(values: Array, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=None, **options)
    expected = reference(params, values)
    rows, logits = table(params, DRAWS), jnp.tile(jnp.asarray(values)[None], (DRAWS, 1))
    adjust = plain_adjust(DRAWS)
    for i, (token, bias) in enumerate(params.logit_bias):
        adjust = Adjust(adjust.ids.at[:, i].set(token), adjust.values.at[:, i].set(bias), jnp.asarray(i + 1, jnp.int32))
    # Every draw sees the same history: updated counts are ignored.
    tokens = np.asarray(draw_full(logits, rows, adjust, counts())[0])
    seen = np.bincount(tokens, minlength=V)
    assert not seen[expected == 0].any(), "an excluded token was sampled"
    # Tokens too rare for the test's normal approximation are pooled.
    rare = expected * DRAWS < 5
    pooled = np.append(expected[~rare], expected[rare].sum()) * DRAWS
    found = np.append(seen[~rare], seen[rare].sum())
    use = pooled > 0
    chi2 = float(((found - pooled)[use] ** 2 / np.maximum(pooled[use], 1)).sum())
    freedom = int(use.sum()) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5, (chi2, freedom)


ALIKE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "top_p": 0.5},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.6},
)


def test_both_programs_sample_equally_if_both_apply() -> None:
    """Whatever the other rows: some have no thresholds, some are greedy, and in `draw_full` one needs more."""
    tables = [table(SamplingParams(**asked, max_tokens=None), 16, seed=9) for asked in ALIKE]
    rows = SamplingRows(jnp.concatenate([one.packed for one in tables]))
    count, vocab = rows.packed.shape[0], 4096
    logits = jax.random.normal(jax.random.key(0), (count, vocab)) * 3
    mine = np.asarray(draw(logits, rows))
    assert len(set(mine.tolist())) > count // 8
    for wants in ({}, {"presence_penalty": 0.5, "logprobs": 3}):
        beside = table(SamplingParams(**wants, max_tokens=None), 1)
        held = jnp.zeros((4, vocab), jnp.int16)
        full, _, _ = draw_full(
            jnp.concatenate([logits, logits[:1]]),
            SamplingRows(jnp.concatenate([rows.packed, beside.packed])),
            plain_adjust(count + 1),
            held,
        )
        assert (mine == np.asarray(full)[:-1]).all()


def test_thresholds_need_no_penalty_state() -> None:
    slots = SlotTable(LIMITS)
    for asked, full in (
        ({"top_p": 0.9, "top_k": 5, "min_p": 0.1}, False),
        ({"logprobs": 0}, True),
        ({"presence_penalty": 0.1}, True),
        ({"logit_bias": ((1, 1.0),)}, True),
    ):
        slots.begin(1, Begin(SamplingParams(**asked), 1, (), (), 3, (1,)))  # type: ignore[arg-type]
        assert bool(slots.full_until[1] > 10) == full, asked


def test_noise_is_gumbel_and_independent_between_seeds_positions_and_tokens() -> None:
    rows = table(SamplingParams(max_tokens=None), 64, seed=2**40 + 3)
    noise = np.asarray(gumbel(rows, 4096))
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.std() == pytest.approx(np.pi / np.sqrt(6), abs=0.01)
    assert np.isfinite(noise).all()
    others = np.asarray(gumbel(table(SamplingParams(max_tokens=None), 64, seed=2**41 + 3), 4096))
    for pair in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise, others)):
        assert abs(np.corrcoef(pair[0].ravel(), pair[1].ravel())[0, 1]) < 0.01


def test_counts_are_updated_only_if_requested_and_do_not_overflow() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=-0.1, max_tokens=None)
    rows, logits = table(params, 1), jnp.asarray(LOGITS)[None]
    best = int(LOGITS.argmax())
    start = counts().at[2, best].set(MOST_COUNTED - 1)
    for expected in (MOST_COUNTED, MOST_COUNTED):
        tokens, _, start = draw_full(logits, rows, plain_adjust(1), start)
        assert (int(tokens[0]), int(start[2, best])) == (best, expected)
    _, _, same = draw_full(logits, table(SamplingParams(max_tokens=None), 1), plain_adjust(1), counts())
    assert (np.asarray(same) == np.asarray(counts())).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_with_nonfinite_logits_are_reported(bad: float) -> None:
    logits = jnp.tile(jnp.asarray(LOGITS)[None], (3, 1)).at[1, 4].set(bad)
    for temperature in (0.0, 1.0):
        rows = table(SamplingParams(temperature=temperature, max_tokens=None), 3)
        for tokens in (draw(logits, rows), draw_full(logits, rows, plain_adjust(3), counts())[0]):
            assert [int(token) == BAD for token in tokens] == [False, True, False]


def test_argmax_takes_the_first_of_equal_scores() -> None:
    x = jnp.asarray([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-jnp.inf, MASKED, -jnp.inf]])
    assert argmax(x).tolist() == [1, 0, 1]


@pytest.mark.parametrize("vocab", [V, 7])
def test_logprobs(vocab: int) -> None:
    logits = LOGITS[None, :vocab]
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    order = np.argsort(-expected)
    token = int(order[2])
    packed = np.asarray(logprobs_of(jnp.asarray(logits), jnp.asarray([token])))
    got = unpack(packed[0], token, 20)
    assert (got.token, got.rank) == (token, 3)
    assert got.logprob == pytest.approx(expected[token], abs=1e-5)
    assert [i for i, _ in got.top] == order[:20].tolist()
    assert [value for _, value in got.top] == pytest.approx(expected[order[:20]].tolist(), abs=1e-5)
    assert unpack(packed[0], token, 0).top == ()


def test_logprobs_are_computed_if_some_row_requests_them() -> None:
    logits = jnp.tile(jnp.asarray(LOGITS)[None], (2, 1))
    for wanted in (None, 0):
        rows = table(SamplingParams(max_tokens=None, logprobs=wanted), 2)
        tokens, packed, _ = draw_full(logits, rows, plain_adjust(2), counts())
        expected = logprobs_of(logits, tokens) if wanted is not None else jnp.zeros_like(packed)
        assert (np.asarray(packed) == np.asarray(expected)).all()


def test_the_top_tokens_equal_those_of_a_sort() -> None:
    """This includes banned tokens, and ties, which are in order of the vocabulary."""
    vocab = 4 * 20 * CHUNK + 1
    x = jax.random.uniform(jax.random.key(vocab), (4, vocab))
    x = x.at[1].set(jnp.round(x[1])).at[2].set(jnp.round(x[2] * 1000)).at[2, vocab - 30 :].add(900.0)
    x = x.at[3].set(-jnp.inf).at[3, vocab - 3].set(2.0)
    for found, expected in zip(jax.jit(best, static_argnums=1)(x, 20), jax.lax.top_k(x, 20), strict=True):
        assert (np.asarray(found) == np.asarray(expected)).all()


def test_the_number_of_adjusted_tokens_has_a_documented_limit() -> None:
    many = range(300)
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(many), logit_bias=tuple((i, 1.0) for i in many))
    with pytest.raises(InvalidValue, match=r"300 end-of-text ids .* 300 in logit_bias .* more than 512"):
        check_adjusted(params, (1, 2))
    check_adjusted(SamplingParams(logit_bias=params.logit_bias), (1, 2))
    assert banned(SamplingParams(stop_token_ids=(5, 1)), (1, 2)) == (1, 2, 5)
