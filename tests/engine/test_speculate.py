"""Verification of drafts on the device: samples follow the target distribution, whatever the drafts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.programs import speculate
from jaxserve.engine.programs.sampling import BAD, Column, SamplingRows, draw, gumbel, heated_and_cut
from jaxserve.engine.programs.speculate import GUESSED, NONE, ngram, probabilistic, salted, strict
from jaxserve.sched.api.params import SamplingParams
from tests.support.engine.statistics import Array, V, chi_square, table
from tests.support.examples import examples

DRAWS, DEPTH = 24_576, 2
RANDOM = np.random.default_rng(0)
TARGET = (RANDOM.normal(size=(DEPTH + 1, V)) * 2).astype(np.float32)  # logits at the three positions of a row
NEAR = TARGET[:DEPTH] + RANDOM.normal(size=(DEPTH, V)).astype(np.float32)
WRONG = -TARGET[:DEPTH]  # prefers the tokens that the target likes least
STYLES = (
    SamplingParams(temperature=0.5, top_k=8),
    SamplingParams(temperature=1.0, top_p=0.85),
    SamplingParams(temperature=1.7, top_k=12, top_p=0.9),
    SamplingParams(temperature=1.0),
)


def drawn(params: SamplingParams, guesses: Array, method: str) -> tuple[Array, Array]:
    """Return tokens [DRAWS, 1 + DEPTH] of as many requests (NONE after the last), and the drafts."""
    packed = np.asarray(table(params, DRAWS).packed).copy()
    packed[:, Column.SEED] = RANDOM.permutation(DRAWS)
    packed[:, Column.POSITION] = 7
    scores = jnp.broadcast_to(jnp.asarray(guesses)[None], (DRAWS, DEPTH, V))
    told = speculate.repeated(jnp.asarray(packed), DEPTH)
    told = salted(told, GUESSED) if method == "probabilistic" else told
    draft = jax.jit(draw)(scores.reshape(-1, V), told).reshape(DRAWS, DEPTH)
    logits = jnp.broadcast_to(jnp.asarray(TARGET)[None], (DRAWS, DEPTH + 1, V)).reshape(-1, V)
    lengths = jnp.full(DRAWS, DEPTH, jnp.int32)
    if method == "strict":
        found = jax.jit(strict)(logits, jnp.asarray(packed), draft, lengths)
    else:
        found = jax.jit(probabilistic)(logits, jnp.asarray(packed), draft, lengths, scores)
    return np.asarray(found), np.asarray(draft)


def expected(params: SamplingParams, position: int) -> Array:
    rows = table(params, 1)
    return np.asarray(jax.nn.softmax(heated_and_cut(jnp.asarray(TARGET[position : position + 1]), rows)))[0]


@pytest.mark.parametrize("method", ["strict", "probabilistic"])
@pytest.mark.parametrize("guesses", [NEAR, WRONG], ids=["near", "wrong"])
@pytest.mark.parametrize("params", STYLES, ids=lambda one: f"t{one.temperature}-k{one.top_k}-p{one.top_p}")
def test_samples_follow_the_target_distribution(params: SamplingParams, guesses: Array, method: str) -> None:
    """Check the first position over all rows, later ones over the rows that reached them.

    The target's logits do not depend on earlier tokens here.
    """
    found, _ = drawn(params, guesses, method)
    for position in range(DEPTH + 1):
        mine = found[:, position]
        mine = mine[mine != NONE]
        if len(mine) >= 1000:
            counts = np.bincount(mine, minlength=V)
            assert chi_square(counts, expected(params, position)) > 1e-4, (position, counts)
    assert len(found) >= 20_000


def test_a_wrong_distribution_is_detected() -> None:
    """The test above can fail: drafts do not follow the target distribution."""
    params = STYLES[3]
    _, draft = drawn(params, NEAR, "strict")
    assert chi_square(np.bincount(draft[:, 0], minlength=V), expected(params, 0)) < 1e-6


def test_rejection_sampling_accepts_as_many_drafts_as_possible() -> None:
    """The highest possible acceptance is the sum of min(p, q) over tokens, which the probabilistic method reaches."""
    params = STYLES[3]
    rows = table(params, 1)
    q = np.asarray(jax.nn.softmax(heated_and_cut(jnp.asarray(NEAR[:1]), rows)))[0]
    most = np.minimum(expected(params, 0), q).sum()
    kept = {}
    for method in ("strict", "probabilistic"):
        found, draft = drawn(params, NEAR, method)
        kept[method] = float((found[:, 1] != NONE).mean())
        assert ((found[:, 0] == draft[:, 0]) | (found[:, 1] == NONE)).all()
    assert kept["probabilistic"] == pytest.approx(most, abs=0.02)
    assert 0.5 * most < kept["strict"] <= most + 0.02


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    lengths=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    method=st.sampled_from(["strict", "probabilistic"]),
)
def test_rows_of_all_draft_lengths(seed: int, temperature: float, lengths: list[int], method: str) -> None:
    """A prefix of the draft is accepted, then one token follows.

    Strict and greedy tokens equal those without drafts.
    """
    random = np.random.default_rng(seed)
    logits = jnp.asarray(random.normal(size=(4 * 4, V)).astype(np.float32) * 3)
    packed = jnp.asarray(np.asarray(table(SamplingParams(temperature=temperature), 4, seed=seed).packed))
    plain = np.asarray(DRAW(logits, speculate.repeated(packed, 4))).reshape(4, 4)
    draft = np.where(random.random((4, 3)) < 0.7, plain[:, :3], random.integers(0, V, (4, 3))).astype(np.int32)
    args = logits, packed, jnp.asarray(draft), jnp.asarray(lengths, jnp.int32)
    scores = jnp.asarray(random.normal(size=(4, 3, V)).astype(np.float32))
    found = np.asarray(STRICT(*args) if method == "strict" else PROBABILISTIC(*args, scores))
    for row, length in enumerate(lengths):
        gained = found[row][found[row] != NONE].tolist()
        assert found[row].tolist() == gained + [NONE] * (4 - len(gained))
        assert 1 <= len(gained) <= length + 1
        assert gained[:-1] == draft[row, : len(gained) - 1].tolist()
        if method == "strict" or not temperature:
            assert gained == plain[row, : len(gained)].tolist()
            assert len(gained) == length + 1 or gained[-1] != draft[row, len(gained) - 1]


DRAW, STRICT, PROBABILISTIC = jax.jit(draw), jax.jit(strict), jax.jit(probabilistic)


@pytest.mark.parametrize("method", ["strict", "probabilistic"])
def test_nonfinite_logits_fail_the_row(method: str) -> None:
    logits = np.zeros((2 * 3, V), np.float32)
    logits[:, 5] = 9
    logits[1] = np.nan  # the second position of the first row
    packed = table(SamplingParams(temperature=0.0), 2).packed
    args = jnp.asarray(logits), packed, jnp.full((2, 2), 5, jnp.int32), jnp.full(2, 2, jnp.int32)
    found = np.asarray(STRICT(*args) if method == "strict" else PROBABILISTIC(*args, jnp.zeros((2, 2, V))))
    assert found.tolist() == [[5, BAD, NONE], [5, 5, 5]]


# ---- prompt lookup
# ---------------------------------------------------------------------------------------------------


def looked_up(text: list[int], count: int, least: int, most: int) -> list[int] | None:
    """Return the tokens after the first occurrence of the longest suffix, by plain search."""
    for size in range(min(most, len(text) - 1), least - 1, -1):
        suffix = text[-size:]
        for at in range(len(text) - size):
            if text[at : at + size] == suffix:
                follows = text[at + size :]
                return (follows * count)[:count]
    return None


@settings(max_examples=examples(60), deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=3, max_size=3),
    bounds=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
)
def test_prompt_lookup(texts: list[list[int]], bounds: tuple[int, int]) -> None:
    history = np.full((3, 24), -1, np.int32)
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    known = jnp.asarray([len(text) for text in texts], jnp.int32)
    found = np.asarray(LOOKUPS[bounds](jnp.asarray(history), known))
    for row, text in enumerate(texts):
        wanted = looked_up(text, 4, *bounds)
        assert found[row].tolist() == (wanted or [text[-1]] * 4), (text, bounds)


LOOKUPS = {
    (least, most): jax.jit(partial(ngram, count=4, least=least, most=most))
    for least, most in ((1, 1), (1, 3), (2, 4), (3, 3))
}


def test_noise_for_different_purposes_is_independent() -> None:
    """Equal noise for drafting, verification and resampling would bias acceptance."""
    packed = table(SamplingParams(), 20_000).packed
    drawing, drafting = (
        np.asarray(gumbel(one, 4))[:, 1] for one in (SamplingRows(packed), salted(SamplingRows(packed), GUESSED))
    )
    judging = np.asarray(speculate.uniform(SamplingRows(packed)))
    assert judging.min() >= 0 and judging.max() < 1 and abs(judging.mean() - 0.5) < 0.01
    for one, other in ((drawing, drafting), (drawing, judging), (drafting, judging)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
