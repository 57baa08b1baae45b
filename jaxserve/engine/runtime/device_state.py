"""The state of an instance on its devices: weights, KV pool, token carry and token counts.

Writer: its executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.memory.transfer import Piece, padded
from jaxserve.engine.programs.draft_inputs import Drafts
from jaxserve.engine.programs.inputs import Batch, Float32, Int32
from jaxserve.engine.programs.mesh import placed
from jaxserve.engine.programs.pooling import POOLED
from jaxserve.engine.programs.program import bound
from jaxserve.engine.programs.sampling import ADJUSTED, MOST_COUNTED, SEEN_IN_PROMPT, Column
from jaxserve.engine.programs.segments import Segments, Walk, outside, pools_of
from jaxserve.engine.programs.speculate import UNKNOWN
from jaxserve.engine.programs.step import SCORED, Carry, EmptyPools, Programs, Tree, extras
from jaxserve.engine.speculation.drafters import Call, Drafter
from jaxserve.sched.api.plan import Begin, Span
from jaxserve.structured.token_filter import Words, all_allowed
from pallas_kernels.attention.api import Pool

# Number of alternatives, and blocks of (targets, their log-probabilities [W, 2 + 2 * MAX_LOGPROBS] int32).
Scores = tuple[int, list[tuple[Int32, jax.Array]]]


class StepOutputs:
    """The arrays that a submitted step returns; they may not have been computed yet."""

    __slots__ = ("logprobs", "pooled", "rows", "scores", "tokens", "verified")

    def __init__(self, rows: jax.Array) -> None:
        self.rows = rows  # [G, E]
        self.tokens: jax.Array | None = None  # [G] int32
        self.verified: jax.Array | None = None  # [G, D] int32, of rows that may draft; see `speculate.strict`
        self.logprobs: jax.Array | None = None  # [G, 2 + 2 * MAX_LOGPROBS] int32
        self.scores: dict[int, Scores] = {}  # by span
        self.pooled: list[tuple[Sequence[int], jax.Array]] = []  # spans, and the sums [N, E] of their hidden states

    def wait(self) -> None:
        """Block until everything is computed; raises what the device raised."""
        jax.block_until_ready([x for x in (self.tokens, self.verified, self.logprobs) if x is not None] or self.rows)
        for _, blocks in self.scores.values():
            jax.block_until_ready([block for _, block in blocks])
        jax.block_until_ready([sums for _, sums in self.pooled])


class Computed(NamedTuple):
    """A step whose sampling is still to be dispatched."""

    rows: jax.Array  # [G, E]
    hidden: jax.Array  # [T, E]
    drafted: jax.Array | None  # [G, K] int32, of the rows that may draft


class DeviceState:
    """The device state of an instance; dispatches programs in order, each on the state of the last."""

    def __init__(
        self,
        programs: Programs,
        mesh: Mesh,
        weights: Tree,
        dtype: Any,
        segments: Segments | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Allocates no pools: `rebuild` does. segments: programs of steps that can be preempted; None: no step can."""
        limits = programs.limits
        self.programs = programs.bound()
        self.segments = None if segments is None else bound(segments)
        self.outer = outside(weights)
        self.mesh = mesh
        self.weights = weights
        self.drafter = drafter
        self.pools: list[Pool] = []
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._kv_buffers = NamedSharding(mesh, programs.spec.cache.kv_buffer_partition)
        self._make = EmptyPools(programs.spec.cache, mesh, limits, dtype)
        self._unadjusted: dict[int, tuple[jax.Array, jax.Array, jax.Array]] = {
            width: self._place(
                (
                    np.full((width, ADJUSTED), limits.vocab, np.int32),
                    np.zeros((width, ADJUSTED), np.float32),
                    all_allowed(width, limits.vocab),
                ),
                self._whole,
            )
            for width in limits.widths
        }
        self.complete = True  # False: until then, programs that only save time are not used; set by its executor
        self.pools = self._make.described  # until `rebuild`
        self.reset()

    @property
    def allocation(self) -> list[Call]:
        """The programs that `rebuild` runs."""
        states = [Call(f"empty state {at}", program, ()) for at, program in enumerate(self._make.states)]
        drafter = () if self.drafter is None else self.drafter.allocation
        return [Call("empty pool", self._make.program, ()), *states, *drafter]

    def rebuild(self) -> None:
        """Reset pools, carry and counts: at the start, and after a failed step lost its donated buffers."""
        self.pools = []  # free the old pools first: both may not fit
        self.pools = self._make()
        self.reset()
        if self.drafter is not None:
            self.drafter.rebuild()

    def reset(self) -> None:
        """Reset carry and counts."""
        limits = self.programs.limits
        self.carry = Carry.made(limits, self.filled)
        self.counts = self._place(np.zeros((limits.slots, limits.vocab), np.int16), self._whole)

    def step(self, batch: Batch, spans: Sequence[Span] = ()) -> tuple[StepOutputs, jax.Array]:
        """Dispatch a step; return its outputs and the hidden states of all its tokens [T, E]."""
        rows, hidden = self._compute(batch)
        return self.draw(batch, spans, rows, hidden), hidden

    def _compute(self, batch: Batch, forced: Words | None = None) -> tuple[jax.Array, jax.Array]:
        step = self.programs.step[batch.bucket]
        if self.drafter is not None and batch.drafts is not None:
            self.carry = self.drafter.draft(self.carry, batch.drafts)
            if forced is not None:
                slots = batch.drafts.sampling[:, Column.SLOT]
                self.carry = self.carry._replace(tokens=self.programs.foresee(self.carry.tokens, slots, forced))
        rows, self.pools, hidden = step(self.weights, self.pools, self.carry.tokens, batch.packed)
        return rows, hidden

    def compute(self, batch: Batch, forced: Words | None = None) -> Computed:
        """Dispatch a step without its sampling, for which `choose` follows before any other step.

        forced: tokens [G, K] instead of drafted ones; -1: keep the drafted one.
        """
        return self._computed(batch, *self._compute(batch, forced))

    def finish(self, walk: Walk) -> Computed:
        """Dispatch the end of a step after its last segment, without its sampling, as `compute` does."""
        return self._computed(walk.batch, *self._finish(walk))

    def _computed(self, batch: Batch, rows: jax.Array, hidden: jax.Array) -> Computed:
        drafted = None
        if batch.drafts is not None:
            drafted = self.programs.drafted(self.carry.tokens, batch.drafts.sampling[:, Column.SLOT])
        return Computed(rows, hidden, drafted)

    def choose(
        self, batch: Batch, spans: Sequence[Span], computed: Computed, rows: Words | None, ahead: Words | None
    ) -> tuple[StepOutputs, jax.Array]:
        """Dispatch the sampling of a computed step; returns as `step` does.

        rows, ahead: masks [G, W] and [G * D, W] of tokens that rows may sample, None: all.
        """
        return self.draw(batch, spans, computed.rows, computed.hidden, rows, ahead), computed.hidden

    def walk(self, batch: Batch) -> Walk | None:
        """Return the segment walk of a step; None if its bucket has no segments."""
        if self.segments is None or not self.complete or batch.bucket not in self.segments.end:
            return None
        return Walk(batch, self.segments.links)

    def segment(self, walk: Walk) -> jax.Array:
        """Dispatch the next segment of a step; return an array that is ready when the segment is done."""
        assert self.segments is not None
        if walk.stream is None:
            begin = self.segments.begin[walk.batch.bucket]
            walk.stream, walk.last = begin(self.outer, self.carry.tokens, walk.batch.packed)
        link = walk.link
        mine = pools_of(link, self.pools)
        x, mine = self.segments.through[link.kind](self.weights["layers"][link.layers], mine, walk.stream)
        if mine[0]:
            self.pools[link.layers] = mine
        walk.stream = walk.stream._replace(x=x)
        walk.at += 1
        return walk.stream.x

    def end(self, walk: Walk, spans: Sequence[Span] = ()) -> tuple[StepOutputs, jax.Array]:
        """Dispatch the end of a step after its last segment; returns as `step` does."""
        rows, hidden = self._finish(walk)
        return self.draw(walk.batch, spans, rows, hidden), hidden

    def _finish(self, walk: Walk) -> tuple[jax.Array, jax.Array]:
        assert self.segments is not None and walk.stream is not None
        rows, hidden = self.segments.end[walk.batch.bucket](self.outer, walk.stream.x, walk.last)
        walk.stream = None
        return rows, hidden

    def draw(
        self,
        batch: Batch,
        spans: Sequence[Span],
        rows: jax.Array,
        hidden: jax.Array,
        masks: Words | None = None,
        ahead: Words | None = None,
    ) -> StepOutputs:
        """Dispatch sampling from rows [G, E], and verification from hidden [T, E] for rows that drafted.

        masks, ahead: see `choose`.
        """
        programs, drawn = self.programs, StepOutputs(rows)
        if self.drafter is not None:
            self.drafter.follow(self.carry, batch, spans)
        if batch.sampling is None:
            return drawn
        if batch.drafts is not None:
            drawn.verified = self._verify(hidden, batch.drafts, ahead, batch.arguments)
            if not batch.full:
                return drawn
        if not batch.full and (masks is None or self.complete):
            draw = programs.draw if masks is None else programs.masked
            more = extras(masks, batch.arguments)
            drawn.tokens, self.carry = draw(self.weights, rows, self.carry, batch.sampling, *more)
            return drawn
        ids, values, allowed = self.unadjusted(batch.bucket.width)
        used = np.int32(0)
        if batch.adjust is not None:
            ids, values = self._place(batch.adjust[:2], self._whole)
            used = np.int32(batch.adjust[2])
        more = extras(allowed if masks is None else masks, batch.arguments)
        every = self.weights, rows, self.carry, self.counts, batch.sampling, ids, values, used, *more
        drawn.tokens, self.carry, self.counts, logprobs = programs.full(*every)
        if batch.logprobs:
            drawn.logprobs = logprobs
        return drawn

    def _verify(self, hidden: jax.Array, drafts: Drafts, masks: Words | None, arguments: Float32 | None) -> jax.Array:
        rows = self.programs.pick(hidden, drafts.places)
        verify = self.programs.verify if masks is None else self.programs.masked_verify
        given = self.weights, rows, self.carry, drafts.sampling, drafts.lengths, *extras(masks, arguments)
        tokens, self.carry = verify(*given)
        verified: jax.Array = tokens
        return verified

    def unadjusted(self, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return ids and values [G, A] that change no logit, and masks [G, W] that allow every token."""
        return self._unadjusted[width]

    def _place(self, values: Any, sharding: NamedSharding) -> Any:
        """Place arrays on this mesh."""
        return placed(values, sharding)

    def replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Return zeros, replicated on every device."""
        zeros: jax.Array = self._place(np.zeros(shape, dtype), self._whole)
        return zeros

    def described(self, shapes: Tree) -> Tree:
        """Return abstract arrays of the given shapes, replicated on every device."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=self._whole, weak_type=array.weak_type
            ),
            shapes,
        )

    def filled(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Return unknown tokens, replicated on every device."""
        array: jax.Array = self._place(np.full(shape, UNKNOWN, dtype), self._whole)
        return array

    def kv_buffer(self, size: int) -> Piece:
        """Return a piece of zeros."""
        shape = self.programs.spec.cache.kv_buffer_shape(size, self.programs.limits.page_size)
        drafted = () if self.drafter is None else self.drafter.kv_buffer(size)
        return self.receive((np.zeros(shape, self._make.dtype), *drafted))

    def score(self, hidden: jax.Array, begin: int, targets: Int32) -> list[tuple[Int32, jax.Array]]:
        """Score `targets`, the tokens that follow hidden[begin], hidden[begin + 1], ..."""
        take, blocks = self.programs.block[hidden.shape[0]], []
        for at in range(0, len(targets), SCORED):
            mine = targets[at : at + SCORED]
            padded = np.zeros(SCORED, np.int32)
            padded[: len(mine)] = mine
            block = take(hidden, np.int32(begin + at))
            blocks.append((mine, self.programs.score(self.weights, block, padded)))
        return blocks

    def pool(self, hidden: jax.Array, parts: Sequence[tuple[int, int]]) -> jax.Array:
        """Sum hidden [T, E] over up to POOLED parts (begin, length); return [POOLED, E], zeros after the parts."""
        begins, lengths = np.zeros((2, POOLED), np.int32)
        begins[: len(parts)], lengths[: len(parts)] = zip(*parts, strict=True)
        sums: jax.Array = self.programs.pool[hidden.shape[0]](hidden, begins, lengths)
        return sums

    def remember(self, slot: int, begin: Begin) -> None:
        """Set the slot's token counts to those of its request so far."""
        vocab = self.programs.limits.vocab
        drawn = np.bincount(np.array(begin.output, np.int64), minlength=vocab)[:vocab]
        row = np.minimum(drawn, MOST_COUNTED).astype(np.int16)
        prompt = np.array(begin.prompt, np.int64)
        row[prompt[(prompt >= 0) & (prompt < vocab)]] |= SEEN_IN_PROMPT
        self.counts = self.programs.remember(self.counts, np.int32(slot), row)

    def begin(self, slot: int, begin: Begin, start: int) -> None:
        """Start a request in a slot: record its known tokens for the drafter; `start` of them have KV."""
        if self.drafter is None:
            return
        row = np.full(self.programs.limits.positions, UNKNOWN, np.int32)
        known = (*begin.prompt, *begin.output)[: len(row)]
        row[: len(known)] = known
        self.carry = self.programs.recall(self.carry, np.int32(slot), row)
        self.drafter.begin(slot, start)

    def export(self, pages: Int32) -> Piece:
        """Gather pages [M] of all layers, including the drafter's, as a piece of a KV buffer."""
        drafted = () if self.drafter is None else self.drafter.export(pages)
        return self.programs.moves.gather(self.kv, pages), *drafted

    def fill(self, pages: Int32, piece: Piece) -> None:
        """Scatter a piece on this mesh into `pages` [M]; ids out of range are padding."""
        cache = self.programs.spec.cache
        kv = self.programs.moves.scatter(self.kv, pages, piece[0])
        self.pools = cache.joined(kv, cache.states(self.pools))
        if self.drafter is not None:
            self.drafter.fill(pages, piece[1:])

    @property
    def kv(self) -> list[Pool]:
        """The pools of the layers with keys and values."""
        return self.programs.spec.cache.kv(self.pools)

    @property
    def states(self) -> list[Pool]:
        """The arrays of the layers with a state per slot."""
        return self.programs.spec.cache.states(self.pools)

    def export_state(self, slot: int) -> Pool | None:
        """Return what layers with a state keep of a slot; None without such layers."""
        if not self.states:
            return None
        state: Pool = self.programs.moves.take(self.states, np.int32(slot))
        return state

    def receive_state(self, state: Pool) -> Pool:
        """Copy a state from another instance onto this mesh."""
        moved: Pool = self._place(state, NamedSharding(self.mesh, self.programs.spec.cache.partition))
        return moved

    def fill_state(self, slot: int, state: Pool) -> None:
        """Set what layers with a state keep of a slot."""
        states = self.programs.moves.put(self.states, np.int32(slot), state)
        self.pools = self.programs.spec.cache.joined(self.kv, states)

    def receive(self, piece: Sequence[Any]) -> Piece:
        """Copy a piece from another instance, or of numpy arrays, onto this mesh."""
        drafted = () if self.drafter is None else self.drafter.receive(piece[1:])
        return self._place(piece[0], self._kv_buffers), *drafted

    def scrub(self, pages: Sequence[int], bucket: int) -> None:
        """Zero pages, `bucket` at a time."""
        zeros = self.kv_buffer(bucket)
        for at in range(0, len(pages), bucket):
            self.fill(padded(pages[at : at + bucket], bucket, self.programs.limits.pages), zeros)
