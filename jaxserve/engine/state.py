"""What an instance holds on its devices: weights, KV pool, token carry and token counts. Writer: its executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.inputs import Batch, Int32
from jaxserve.engine.kv import pool_maker
from jaxserve.engine.sampling import ADJUSTED, MOST_COUNTED, SEEN_IN_PROMPT
from jaxserve.engine.step import SCORED, Programs, Tree
from jaxserve.sched.plan import Begin
from pallas_kernels.dispatch import Pool

# Alternatives wanted, and blocks of (targets, their log-probabilities [W, 2 + 2 * MAX_LOGPROBS] int32).
Scores = tuple[int, list[tuple[Int32, jax.Array]]]


class Drawn:
    """What a submitted step leaves on the device: arrays that may not have been computed yet."""

    __slots__ = ("logprobs", "rows", "scores", "tokens")

    def __init__(self, rows: jax.Array) -> None:
        self.rows = rows  # [G, E]
        self.tokens: jax.Array | None = None  # [G] int32
        self.logprobs: jax.Array | None = None  # [G, 2 + 2 * MAX_LOGPROBS] int32
        self.scores: dict[int, Scores] = {}  # by span

    def wait(self) -> None:
        """Block until all of it is computed; raises what the device raised."""
        jax.block_until_ready([x for x in (self.tokens, self.logprobs) if x is not None] or self.rows)
        for _, blocks in self.scores.values():
            jax.block_until_ready([block for _, block in blocks])


class DeviceState:
    """Dispatches programs in order, each on what the one before it left."""

    def __init__(self, programs: Programs, mesh: Mesh, weights: Tree, dtype: Any) -> None:
        limits = programs.limits
        self.programs = programs
        self.mesh = mesh
        self.weights = weights
        self.pools: list[Pool] = []
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._parcels = NamedSharding(mesh, programs.spec.cache.parcel_partition)
        self._make = pool_maker(programs.spec, mesh, limits.pages, limits.page_size, dtype)
        self._unadjusted: dict[int, tuple[jax.Array, jax.Array]] = {
            width: jax.device_put(
                (np.full((width, ADJUSTED), limits.vocab, np.int32), np.zeros((width, ADJUSTED), np.float32)),
                self._whole,
            )
            for width in limits.widths
        }
        self.rebuild()

    def rebuild(self) -> None:
        """Empty pools, nothing remembered: at the start, and after a step raised and its donated buffers are gone."""
        limits = self.programs.limits
        self.pools = []  # let go of the old ones first: both may not fit
        self.pools = self._make()
        self.carry = jax.device_put(np.zeros(limits.slots, np.int32), self._whole)
        self.counts = jax.device_put(np.zeros((limits.slots, limits.vocab), np.int16), self._whole)

    def step(self, batch: Batch) -> tuple[Drawn, jax.Array]:
        """Dispatch a step; returns also the hidden states of all its tokens [T, E]."""
        programs = self.programs
        rows, self.pools, hidden = programs.step[batch.bucket](self.weights, self.pools, self.carry, batch.packed)
        drawn = Drawn(rows)
        if batch.sampling is None:
            return drawn, hidden
        if not batch.full:
            drawn.tokens, self.carry = programs.plain(self.weights, rows, self.carry, batch.sampling)
            return drawn, hidden
        ids, values = self.unadjusted(batch.bucket.width)
        used = np.int32(0)
        if batch.adjust is not None:
            ids, values = jax.device_put(batch.adjust[:2], self._whole)
            used = np.int32(batch.adjust[2])
        drawn.tokens, self.carry, self.counts, logprobs = programs.full(
            self.weights, rows, self.carry, self.counts, batch.sampling, ids, values, used
        )
        if batch.logprobs:
            drawn.logprobs = logprobs
        return drawn, hidden

    def unadjusted(self, width: int) -> tuple[jax.Array, jax.Array]:
        """Ids and values [G, A] that change no logit."""
        return self._unadjusted[width]

    def replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Zeros, whole on each device."""
        zeros: jax.Array = jax.device_put(np.zeros(shape, dtype), self._whole)
        return zeros

    def parcel(self, size: int) -> jax.Array:
        """A piece of zeros."""
        shape = self.programs.spec.cache.parcel_shape(size, self.programs.limits.page_size)
        return self.receive(np.zeros(shape, self.pools[0][0].dtype))

    def score(self, hidden: jax.Array, begin: int, targets: Int32) -> list[tuple[Int32, jax.Array]]:
        """Log-probabilities of `targets`, each the token after hidden[begin], hidden[begin + 1], ..."""
        take, blocks = self.programs.block[hidden.shape[0]], []
        for at in range(0, len(targets), SCORED):
            mine = targets[at : at + SCORED]
            padded = np.zeros(SCORED, np.int32)
            padded[: len(mine)] = mine
            block = take(hidden, np.int32(begin + at))
            blocks.append((mine, self.programs.score(self.weights, block, padded)))
        return blocks

    def remember(self, slot: int, begin: Begin) -> None:
        """Set the slot's token counts to those of its request so far."""
        vocab = self.programs.limits.vocab
        drawn = np.bincount(np.array(begin.output, np.int64), minlength=vocab)[:vocab]
        row = np.minimum(drawn, MOST_COUNTED).astype(np.int16)
        prompt = np.array(begin.prompt, np.int64)
        row[prompt[(prompt >= 0) & (prompt < vocab)]] |= SEEN_IN_PROMPT
        self.counts = self.programs.remember(self.counts, np.int32(slot), row)

    def export(self, pages: Int32) -> jax.Array:
        """Pages [M] of all layers as one array, a piece of a parcel."""
        parcel: jax.Array = self.programs.gather(self.pools, pages)
        return parcel

    def fill(self, pages: Int32, parcel: jax.Array) -> None:
        """Put a parcel that lies on this mesh into `pages` [M]; those out of range are padding."""
        self.pools = self.programs.scatter(self.pools, pages, parcel)

    def receive(self, parcel: Any) -> jax.Array:
        """A parcel from another instance, or of numpy, on this mesh."""
        here: jax.Array = jax.device_put(parcel, self._parcels)
        return here

    def scrub(self, pages: Sequence[int], bucket: int) -> None:
        """Zero pages, as many at a time as a piece of a parcel has."""
        zeros = self.parcel(bucket)
        for at in range(0, len(pages), bucket):
            self.fill(padded(pages[at : at + bucket], bucket, self.programs.limits.pages), zeros)


def padded(pages: Sequence[int], bucket: int, out_of_range: int) -> Int32:
    """Pages [M] of a parcel's bucket."""
    ids = np.full(bucket, out_of_range, np.int32)
    ids[: len(pages)] = pages
    return ids
