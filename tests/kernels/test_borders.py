"""Sampling thresholds by XLA and by the Hopper kernel, against float64.

A row keeps every logit down to some threshold, including ties. If float64 keeps more or fewer, the
share of the mass above the threshold is top-p's within rounding.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.choice import Unsupported
from pallas_kernels.ops.sampling_threshold.api import (
    MosaicThresholds,
    Thresholds,
    ThresholdSpec,
    resolve_sampling,
    thresholds,
)
from pallas_kernels.ops.sampling_threshold.hopper import Config, heuristic, supports
from pallas_kernels.ops.sampling_threshold.search import Options, after, before
from pallas_kernels.ops.sampling_threshold.xla import bisected, swept
from pallas_kernels.ops.sampling_threshold.xla import thresholds as by_xla
from tests.support.examples import examples
from tests.support.kernels.checks import sampling
from tests.support.kernels.checks.sampling import (
    CUTS,
    KINDS,
    SMALL,
    Asks,
    check,
    check_kernel,
    options,
    rows,
)
from tests.support.kernels.interpreted import needs_interpreter

XLA = {"on a CPU": jax.jit(bisected), "on a GPU": jax.jit(swept)}


@pytest.mark.parametrize("where", XLA)
@pytest.mark.parametrize("kind", KINDS)
def test_xla_keeps_what_float64_keeps(kind: str, where: str) -> None:
    x = rows(kind, 5003, len(CUTS))
    found = XLA[where](jnp.asarray(x), options(CUTS))
    check(x, CUTS, np.asarray(found.threshold))
    assert np.asarray(found.sweeps).max() <= (65 if where == "on a CPU" else 25)


LOOKS = {  # sweeps over 128,256 logits, mean and maximum: the table of docs/reference/kernels.md
    ("zipf", Asks(top_k=50)): (1.0, 1),
    ("zipf", Asks(top_p=0.9)): (1.0, 1),
    ("zipf", Asks(top_k=50, top_p=0.9)): (1.0, 1),
    ("normal", Asks(top_k=50)): (1.0, 1),
    ("normal", Asks(top_p=0.9)): (4.0, 4),
    ("normal", Asks(top_k=50, top_p=0.9)): (1.0, 1),
}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "asks"), LOOKS)
def test_rows_need_as_few_sweeps_as_documented(kind: str, asks: Asks) -> None:
    draw = np.random.default_rng(7)
    x = draw.normal(size=(16, 128256))
    if kind == "zipf":  # weights fall as rank^-1.5
        x = -1.5 * np.log1p(np.argsort(np.argsort(draw.random(x.shape)))) + 0.3 * x
    sweeps = np.asarray(XLA["on a GPU"](jnp.asarray(x, jnp.float32), options((asks,) * 16)).sweeps)
    print(kind, asks, f"looks: {sweeps.mean():.2f}, at most {sweeps.max()}")
    mean, most = LOOKS[kind, asks]
    assert sweeps.mean() <= mean and sweeps.max() <= most


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 2**31), st.integers(0, 90), st.floats(1e-6, 1.0), st.floats(0.0, 0.5), st.sampled_from(KINDS))
def test_small_rows(seed: int, top_k: int, top_p: float, min_p: float, kind: str) -> None:
    sampling.RANDOM = np.random.default_rng(seed)
    x, asks = rows(kind, 61, 3), (Asks(top_k, top_p, min_p, 0.8),) * 3
    for by in XLA.values():
        check(x, asks, np.asarray(by(jnp.asarray(x), options(asks)).threshold))


def test_a_row_alone_is_as_among_others() -> None:
    x, told = jnp.asarray(rows("tied", 2048, len(CUTS))), options(CUTS)
    together = by_xla(x, told)
    for row in range(len(CUTS)):
        alone = by_xla(x[row : row + 1], Options(*(one[row : row + 1] for one in told)))
        assert alone.threshold[0] == together.threshold[row] and alone.sweeps[0] == together.sweeps[row]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_end(bad: float) -> None:
    x = rows("normal", 512, len(CUTS))
    x[:, 100 if np.isnan(bad) or bad > 0 else slice(None)] = bad
    assert np.asarray(XLA["on a GPU"](jnp.asarray(x), options(CUTS)).sweeps).max() <= 2


@given(st.floats(1e-29, 1e36), st.booleans())  # below, steps are wider: SMALLEST
def test_numbers_have_neighbors(size: float, negative: bool) -> None:
    x = np.float32(-size if negative else size)
    assert after(jnp.float32(x)) == np.nextafter(x, np.float32(np.inf))
    assert before(jnp.float32(x)) == np.nextafter(x, np.float32(-np.inf))


# ---- the kernel ----------------------------------------------------------------------------------------------------


@needs_interpreter
def test_the_kernel_keeps_what_float64_keeps() -> None:
    """One row of each kind: some are not swept, some are decided by one sweep, and some take several."""
    asks = (Asks(top_k=20, top_p=0.9), Asks(), Asks(top_p=0.9), Asks(top_k=400))
    x = np.concatenate([rows(kind, 1004, 1) for kind in ("peaked", "normal", "normal", "tied")])
    sweeps = check_kernel(x, asks)
    assert sweeps[0] == 1 and sweeps[1] == 0 and 1 < sweeps[2] <= 6 and sweeps[3] <= 6


@pytest.mark.full
@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_on_all_kinds(kind: str) -> None:
    check_kernel(rows(kind, 1004, len(CUTS)), CUTS)


@pytest.mark.full
@needs_interpreter
@pytest.mark.parametrize("config", [replace(SMALL, stages=1), Config(256, 256, 3), Config(128, 512, 8)])
@pytest.mark.parametrize("vocab", [1024, 2044])
def test_configs(config: Config, vocab: int) -> None:
    check_kernel(rows("normal", vocab, 3), (CUTS[5], CUTS[7], CUTS[10]), config)


@needs_interpreter
def test_tiles_that_are_overwritten_while_they_are_read_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the test: a ring whose slots are refilled before they were read is caught."""
    from pallas_kernels.ops.sampling_threshold import hopper as borders_body

    monkeypatch.setattr(borders_body.plgpu, "commit_smem", lambda: None)
    with pytest.raises(AssertionError, match="races"):
        check_kernel(rows("peaked", 1024, 1), (Asks(top_k=5),), replace(SMALL, stages=1))


@pytest.mark.parametrize(
    ("config", "vocab", "why"),
    [
        (SMALL, 1002, "vocab=1002 must be a multiple of 4"),
        (SMALL, 128, "vocab=128 must be at least self.tile=256"),
        (replace(SMALL, lanes=100), 1024, "self.lanes=100 must be a multiple of 128"),
        (replace(SMALL, tile=320), 1024, "divide self.tile=320"),
        (replace(SMALL, stages=0), 1024, "self.stages=0 must be positive"),
        (replace(SMALL, stages=400), 1024, "bytes of shared memory"),
    ],
)
def test_configs_that_cannot_be_are_named(config: Config, vocab: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config.validate(vocab)


@given(st.integers(32, 70000))
def test_a_vocabulary_has_a_config_or_a_reason(quarter: int) -> None:
    assert supports(4 * quarter) is None
    heuristic(4 * quarter).validate(4 * quarter)
    assert "multiple of 4" in str(supports(4 * quarter + 1))


# ---- the choice ----------------------------------------------------------------------------------------------------

HOPPER = ThresholdSpec(128256, platform="gpu", device="NVIDIA H200", capability="9.0")
CHOSEN: list[tuple[ThresholdSpec, Thresholds]] = [
    (HOPPER, MosaicThresholds(HOPPER)),
    (replace(HOPPER, vocab=50257), by_xla),
    (replace(HOPPER, capability="8.0"), by_xla),
    (ThresholdSpec(4096, platform="cpu"), by_xla),
    (ThresholdSpec(4096, platform="tpu"), by_xla),
]


@pytest.mark.parametrize(("spec", "backend"), CHOSEN)
def test_what_is_chosen(spec: ThresholdSpec, backend: Thresholds) -> None:
    choice = resolve_sampling(spec)
    assert thresholds(choice) == backend
    assert bool(choice.refusals) == (spec.platform == "gpu" and backend is by_xla)


def test_what_is_named_runs_or_is_an_error() -> None:
    assert thresholds(resolve_sampling(HOPPER, "xla")) is thresholds(None) is by_xla
    with pytest.raises(Unsupported, match=r"vocab=50257 must be a multiple of 4.*allowed: auto, xla"):
        resolve_sampling(replace(HOPPER, vocab=50257), "mosaic_gpu")
