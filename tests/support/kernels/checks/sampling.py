"""Check sampling thresholds against float64: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.ops.sampling_threshold.hopper import Config
from pallas_kernels.ops.sampling_threshold.hopper import thresholds as by_mosaic
from pallas_kernels.ops.sampling_threshold.search import LOG2_E, Options
from tests.support.kernels.interpreted import without_races

Array = npt.NDArray[Any]
ROUNDING = 3e-6  # of a mass
RANDOM = np.random.default_rng(0)


@dataclass(frozen=True)
class Asks:
    """The sampling options of one row."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


CUTS = (
    Asks(top_k=1),
    Asks(top_k=50),
    Asks(top_k=10**9),
    Asks(top_p=1e-6),
    Asks(top_p=0.6, temperature=0.3),
    Asks(top_p=0.9),
    Asks(top_p=0.9999),
    Asks(top_k=50, top_p=0.9),
    Asks(top_k=700, top_p=0.9),
    Asks(min_p=0.05),
    Asks(top_k=40, top_p=0.95, min_p=0.01, temperature=1.7),
    Asks(),
)


def options(asks: tuple[Asks, ...]) -> Options:
    with np.errstate(divide="ignore"):
        least = [one.temperature * np.log(one.min_p) for one in asks]
    told = ([LOG2_E / one.temperature for one in asks], least, [one.top_k for one in asks], [one.top_p for one in asks])
    return Options(*(jnp.asarray(each, jnp.float32) for each in told))


def rows(kind: str, vocab: int, count: int) -> Array:
    """Return logits [count, vocab] of a kind."""
    x = RANDOM.normal(size=(count, vocab))
    if kind == "peaked":  # like a language model's: weights fall as a power of the rank
        x = -1.6 * np.log1p(np.argsort(np.argsort(-x))) + 0.3 * x
    elif kind == "tied":
        x = np.round(4 * x) / 4
    elif kind == "constant":
        x = np.full_like(x, -3.25)
    elif kind == "masked":  # like logits masked by a grammar
        x = np.where(RANDOM.random(x.shape) < 0.03, x, -np.inf)
        x[:, 7] = 0.0
    elif kind == "padded":
        x[:, vocab - vocab // 5 :] = -np.inf
    elif kind == "around zero":
        x = np.where(RANDOM.random(x.shape) < 0.5, 0.0, 1e-3 * x)
    return x.astype(np.float32)


KINDS = ("normal", "peaked", "tied", "constant", "masked", "padded", "around zero")


def check(x: Array, asks: tuple[Asks, ...], threshold: Array) -> None:
    for row, one, found in zip(x, asks, threshold, strict=True):
        kept = (row >= found) & (row > -1e30)
        want = row >= max(float(row.max()) + one.temperature * np.log(max(one.min_p, 1e-300)), -1e30)
        if one.top_k:
            want &= row >= np.sort(row)[-min(one.top_k, len(row))]
        weight = np.where(want, np.exp((row.astype(np.float64) - row.max()) / one.temperature), 0.0)
        if one.top_p < 1:
            order = np.argsort(-row, kind="stable")
            enough = np.searchsorted(np.cumsum(weight[order]), one.top_p * weight.sum())
            want &= row >= row[order[min(enough, len(row) - 1)]]
        assert kept.any() and row[kept].min() > max(row[~kept], default=-np.inf)
        if (kept != want).any():  # only by rounding: the logits between have no weight, or the sum was barely enough
            assert one.top_p < 1, (one, kept.sum(), want.sum())
            share = weight[kept].sum() / weight.sum()
            lowest = row[kept].min()
            assert share >= one.top_p - ROUNDING, (one, share)
            assert weight[row > lowest].sum() / weight.sum() < one.top_p + ROUNDING, (one, share)


SMALL = Config(lanes=128, tile=256, stages=2)


def check_kernel(x: Array, asks: tuple[Asks, ...], config: Config = SMALL) -> Array:
    """Check that the kernel keeps what float64 keeps; return how often each row was swept."""
    told = options(asks)
    with without_races() as interpret:
        program = jax.jit(lambda x, told: by_mosaic(x, told, config=config, interpret=interpret))
        found = jax.block_until_ready(program(jnp.asarray(x), told))
    check(x, asks, np.asarray(found.threshold))
    return np.asarray(found.sweeps)
