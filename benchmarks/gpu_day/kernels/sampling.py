"""Time the search for top-k and top-p thresholds, and sampling with the thresholds found, as the engine does.

Compares the kernel, the XLA search, and a sort of all logits. Bytes are those of one pass over the logits, so "x floor"
counts passes; `sweeps` is the number of passes over a row to find its threshold, mean and maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_day.part import Run, Skip
from jaxserve.engine.programs.sampling import Column, SamplingRows, draw
from pallas_kernels.ops.sampling_threshold import hopper
from pallas_kernels.ops.sampling_threshold.search import LOG2_E, Found, Options
from pallas_kernels.ops.sampling_threshold.xla import swept

from .timing import Timing, interpreter_or_none, reading

ROWS, VOCAB = 256, 128256
ASKS = {"k50": (50.0, 1.0), "p0.9": (0.0, 0.9), "k50 p0.9": (50.0, 0.9)}


def logits(kind: str, rows: int, vocab: int) -> jax.Array:
    """Return logits [rows, vocab]. zipf: probabilities fall as a power of the rank; normal: unrealistically flat."""
    x = jax.random.normal(jax.random.key(7), (rows, vocab), jnp.float32)
    if kind == "zipf":
        rank = jnp.argsort(jnp.argsort(-jax.random.uniform(jax.random.key(8), (rows, vocab))))
        x = -1.5 * jnp.log1p(rank.astype(jnp.float32)) + 0.3 * x
    return x


def measure(run: Run, kinds: list[str], asks: list[str]) -> None:
    """Time every kind of logits with every pair of top-k and top-p."""
    time = Timing(run)
    rows, vocab = (2, 512) if run.dry else (ROWS, VOCAB)
    with time.each() as attempt:
        for kind in kinds:
            for ask in asks:
                name = f"sampling {rows}x{vocab} {kind} {ask}"
                attempt(name, lambda name=name, kind=kind, ask=ask: _case(time, name, kind, ask, rows, vocab))


def _case(time: Timing, name: str, kind: str, asks: str, rows: int, vocab: int) -> None:
    x, (top_k, top_p) = logits(kind, rows, vocab), ASKS[asks]
    options = Options(*(jnp.full(rows, value, jnp.float32) for value in (LOG2_E, -jnp.inf, top_k, top_p)))
    kept = None
    for label, call in _calls(time, vocab).items():
        found = jax.jit(call)(x, options)
        mine = np.asarray(jnp.sum(x >= found.threshold[:, None], axis=1))
        kept = mine if kept is None else kept
        apart = np.abs(mine - kept).max()  # summation order may change the count by one token in a thousand
        assert apart <= 1 + 1e-3 * kept.max(), f"{label} keeps {apart} tokens more or fewer than the first variant"
        turns = 1 if time.dry else 20
        moved = 4.0 * rows * vocab
        took = time.seconds(reading(lambda x, o, call=call: call(x, o).threshold, turns), (x, [(options,)], ()), turns)
        sweeps = np.asarray(found.sweeps)
        time.add(name, label, took, moved=moved, sweeps=float(sweeps.mean()), most_sweeps=int(sweeps.max()))
        if time.dry and label != "xla":
            continue
        drawing = reading(lambda x, packed, call=call: draw(x, SamplingRows(packed), call), turns)
        took = time.seconds(drawing, (x, [(_rows(rows, top_k, top_p),)], ()), turns)
        time.add(name, f"draw, {label}", took, moved=moved)


def _rows(rows: int, top_k: float, top_p: float) -> jax.Array:
    """Return the engine's packed sampling parameters of rows with this top-k and top-p, at temperature 1."""
    packed = np.zeros((rows, len(Column)), np.int32)
    packed[:, Column.SEED] = np.arange(rows)
    packed[:, Column.TOP_K] = int(top_k)
    packed[:, [Column.TEMPERATURE, Column.TOP_P]] = np.array([1.0, top_p], np.float32).view(np.int32)
    return jnp.asarray(packed)


def _calls(time: Timing, vocab: int) -> dict[str, Callable[[jax.Array, Options], Found]]:
    calls: dict[str, Callable[[jax.Array, Options], Found]] = {"xla": swept, "sort": _sorted}
    with suppress(Skip):  # a dry run without an interpreter of Hopper kernels
        told: Any = interpreter_or_none(time.dry)
        config = hopper.heuristic(vocab)
        calls["mosaic"] = lambda x, options: hopper.thresholds(x, options, config=config, interpret=told)
    return calls


def _sorted(x: jax.Array, options: Options) -> Found:
    """Find the thresholds by sorting all logits."""
    falling = -lax.sort(-x, dimension=1)
    place = jnp.arange(x.shape[1], dtype=jnp.float32)[None]
    few = (options.top_k[:, None] == 0) | (place < options.top_k[:, None])
    weight = jnp.where(few, jnp.exp2((falling - falling[:, :1]) * options.rate[:, None]), 0.0)
    before = jnp.cumsum(weight, axis=1) - weight
    kept = few & (before < options.top_p[:, None] * jnp.sum(weight, axis=1, keepdims=True))
    last = jnp.maximum(jnp.sum(kept, axis=1) - 1, 0)
    threshold = jnp.take_along_axis(falling, last[:, None], axis=1)[:, 0]
    return Found(threshold, jnp.zeros(x.shape[0], jnp.int32))
