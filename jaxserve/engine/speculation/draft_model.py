"""A draft model.

Its KV has pools of its own with the same page ids as the target's, so it follows a request's pages
through prefix hits, preemption and transfers.

Each slot has a cursor: the positions with computed KV. The draft model computes prompts along with
the target. Rows that decoded without drafts catch up when they draft again. Wrong or missing KV
costs accepted drafts, but never changes a token.

Letters: S rows that draft, T tokens, P pages per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.memory.transfer import padded, piece_sizes
from jaxserve.engine.programs.backends import Backends
from jaxserve.engine.programs.draft_inputs import DraftColumn, Drafts, Int32, idle_rows
from jaxserve.engine.programs.inputs import Batch, Bucket, Layout, Limits
from jaxserve.engine.programs.mesh import placed
from jaxserve.engine.programs.program import Program, bound
from jaxserve.engine.programs.sampling import Column, SamplingRows, draw
from jaxserve.engine.programs.speculate import GUESSED, salted
from jaxserve.engine.programs.step import Carry, EmptyPools, KVPrograms, Logits, Tree, logits_of, unpack
from jaxserve.engine.speculation.drafters import Call, drafted_into
from jaxserve.models import registry
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.plan import Span
from pallas_kernels.attention.api import Attention, Pool
from pallas_kernels.layout import Ragged
from pallas_kernels.ops.sampling_threshold.api import Thresholds

FROM_HISTORY = np.iinfo(np.int32).min  # placeholder of a token that is in the device's history


class DraftPrograms:
    """The jitted functions of a draft model, shared by equal instances. `limits` are the target's."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, limits: Limits, backends: Backends | None = None) -> None:
        self.spec = spec
        self.limits = limits
        shape = mesh.abstract_mesh
        whole = NamedSharding(shape, PartitionSpec())
        pools = spec.cache.pools(NamedSharding(shape, spec.cache.partition))
        single, several = ((backends or Backends()).kernel(shape, decode=decode) for decode in (True, False))
        pair = (backends or Backends()).kernel(shape, few=True)
        logits = partial(logits_of, spec=spec, whole=whole)
        draft = partial(_draft, spec=spec, limits=limits, attention=single, pair=pair, logits=logits)
        draft = partial(draft, thresholds=(backends or Backends()).thresholds(shape))
        self.draft = Program(draft, "draft", (whole, pools, whole), (1, 2, 3))
        self.follow: dict[Bucket, Program] = {}
        for bucket in limits.buckets:
            if bucket.prompts:
                program = partial(_follow, spec=spec, limits=limits, bucket=bucket, kernel=several)
                self.follow[bucket] = Program(program, f"follow_{bucket.tokens}", pools, (1,))
        self.moves = KVPrograms(spec.cache, shape)

    def bound(self) -> DraftPrograms:
        """Return the programs of one instance: each with executables of its own."""
        programs = bound(self)
        programs.moves = bound(self.moves)
        return programs


class DraftModel:
    """The draft model of one instance. Writer of its pools and cursors."""

    def __init__(self, programs: DraftPrograms, mesh: Mesh, weights: Tree, dtype: Any) -> None:
        limits = programs.limits
        self._programs = programs.bound()
        self._weights = weights
        self._kv_buffers = NamedSharding(mesh, programs.spec.cache.kv_buffer_partition)
        self._make = EmptyPools(programs.spec.cache, mesh, limits, dtype)
        self._pools: list[Pool] = self._make.described  # until `rebuild`
        self._done = np.zeros(limits.slots + 1, np.int64)  # positions of each slot with computed KV

    @property
    def allocation(self) -> list[Call]:
        return [Call("empty draft pool", self._make.program, ())]

    def rebuild(self) -> None:
        self._pools = []
        self._pools = self._make()
        self._done[:] = 0

    def begin(self, slot: int, start: int) -> None:
        self._done[slot] = start

    def draft(self, carry: Carry, drafts: Drafts) -> Carry:
        slots, starts, counts = drafts.rows[:, : len(DraftColumn)].T
        done = np.minimum(self._done[slots], starts)
        behind = np.flatnonzero((done < starts - 1) & (counts > 0))
        if len(behind):
            self._catch_up(carry, drafts.rows[behind], done[behind])
        tokens, self._pools, scores = self._programs.draft(
            self._weights, self._pools, carry.tokens, carry.scores, carry.history, drafts.rows, drafts.drawn
        )
        self._done[slots] = starts + counts
        return carry._replace(tokens=tokens, scores=scores)

    def follow(self, carry: Carry, batch: Batch, spans: Sequence[Span]) -> None:
        program = self._programs.follow.get(batch.bucket)
        if program is None:
            return
        self._pools = program(self._weights, self._pools, carry.tokens, carry.history, batch.packed)
        for span in spans:
            if self._done[span.slot] >= span.start:
                self._done[span.slot] = span.start + span.length

    def _catch_up(self, carry: Carry, rows: Int32, done: np.ndarray[Any, Any]) -> None:
        """Compute `rows` [S, len(DraftColumn) + P] from `done` [S] to the token before their last."""
        buckets = list(self._programs.follow)
        most, room = buckets[-1].tokens, buckets[-1].tokens
        pieces: list[tuple[Int32, int, int]] = []
        for row, begin in zip(rows, done.tolist(), strict=True):
            end = int(row[DraftColumn.START]) - 1
            while begin < end:
                length = min(end - begin, room)
                pieces.append((row, begin, length))
                begin, room = begin + length, room - length
                if not room:
                    self._compute(carry, pieces, buckets)
                    pieces, room = [], most
        if pieces:
            self._compute(carry, pieces, buckets)

    def _compute(self, carry: Carry, pieces: list[tuple[Int32, int, int]], buckets: list[Bucket]) -> None:
        limits, total = self._programs.limits, sum(length for _, _, length in pieces)
        bucket = next(candidate for candidate in buckets if candidate.tokens >= total and candidate.rows >= len(pieces))
        at = Layout.of(bucket, limits)
        packed = np.zeros(at.end, np.int32)
        packed[:total] = FROM_HISTORY
        packed[at.starts : at.lengths] = total
        first = 0
        for index, (row, begin, length) in enumerate(pieces):
            packed[at.starts + index], packed[at.lengths + index] = first, length
            packed[at.contexts + index] = begin + length
            packed[at.slots + index] = row[DraftColumn.SLOT]
            table = at.tables + index * limits.row_pages
            packed[table : table + limits.row_pages] = row[len(DraftColumn) :]
            first += length
        program = self._programs.follow[bucket]
        self._pools = program(self._weights, self._pools, carry.tokens, carry.history, packed)

    def export(self, pages: Int32) -> tuple[jax.Array, ...]:
        return (self._programs.moves.gather(self._pools, pages),)

    def fill(self, pages: Int32, kv_buffer: Sequence[jax.Array]) -> None:
        self._pools = self._programs.moves.scatter(self._pools, pages, *kv_buffer)

    def receive(self, kv_buffer: Sequence[Any]) -> tuple[jax.Array, ...]:
        return tuple(placed(array, self._kv_buffers) for array in kv_buffer)

    def kv_buffer(self, size: int) -> tuple[Any, ...]:
        shape = self._programs.spec.cache.kv_buffer_shape(size, self._programs.limits.page_size)
        return (np.zeros(shape, self._pools[0][0].dtype),)

    def calls(self, carry: Carry) -> list[Call]:
        programs, limits, calls = self._programs, self._programs.limits, []
        for bucket in limits.buckets:
            if bucket.decode:
                rows = idle_rows(bucket.rows, limits.row_pages, limits.slots)
                drawn = np.zeros((bucket.rows, len(Column)), np.int32)
                args = self._weights, self._pools, carry.tokens, carry.scores, carry.history, rows, drawn
                calls.append(Call(f"draft {bucket.rows}", programs.draft, args))
        for bucket, program in programs.follow.items():
            packed = np.zeros(Layout.of(bucket, limits).end, np.int32)
            chunk = self._weights, self._pools, carry.tokens, carry.history, packed
            calls.append(Call(f"follow {bucket.tokens}", program, chunk))
        for size in piece_sizes(limits.row_pages):
            pages = padded((), size, limits.pages)
            calls.append(Call(f"export draft {size}", programs.moves.gather, (self._pools, pages)))
            filled = self._pools, pages, *self.receive(self.kv_buffer(size))
            calls.append(Call(f"import draft {size}", programs.moves.scatter, filled))
        return calls

    def run(self, carry: Carry) -> None:
        """Run every bucket that catching up uses; `DeviceState.step` on padding does not."""
        limits = self._programs.limits
        for bucket, program in self._programs.follow.items():
            packed = np.zeros(Layout.of(bucket, limits).end, np.int32)
            self._pools = program(self._weights, self._pools, carry.tokens, carry.history, packed)


def _follow(
    weights: Tree,
    pools: list[Pool],
    tokens: jax.Array,  # `Carry.tokens`
    history: jax.Array,  # `Carry.history`
    packed: jax.Array,  # [Layout.end] int32, as the target's, or FROM_HISTORY for tokens
    *,
    spec: ModelSpec,
    limits: Limits,
    bucket: Bucket,
    kernel: Attention,
) -> list[Pool]:
    """Return the pools with the KV of a step's tokens."""
    ids, ragged, _ = unpack(packed, tokens, bucket, limits)
    at = Layout.of(bucket, limits)
    slots = packed[at.slots : at.last][jnp.minimum(ragged.rows, bucket.rows - 1)]
    ids = jnp.where(packed[: at.starts] == FROM_HISTORY, history[slots, ragged.positions], ids)
    _, pools = registry.forward(spec, weights, pools, jnp.maximum(ids, 0), ragged, attention=kernel)
    return pools


def _draft(
    weights: Tree,
    pools: list[Pool],
    tokens: jax.Array,  # `Carry.tokens`
    scores: jax.Array,  # `Carry.scores`
    history: jax.Array,  # `Carry.history`
    rows: jax.Array,  # [S, len(DraftColumn) + P] int32, by falling COUNT
    drawn: jax.Array,  # [S, len(Column)] int32, how the rows draw; POSITION of their first drafted token
    *,
    spec: ModelSpec,
    limits: Limits,
    attention: Attention,
    pair: Attention,
    logits: Logits,
    thresholds: Thresholds,
) -> tuple[jax.Array, list[Pool], jax.Array]:
    """Draft tokens; return the carry's tokens with the drafted ones, the pools, and the carry's scores.

    The first pass computes each row's last two tokens: after a fully accepted draft the KV of the one
    before the last is missing. Then one token per pass, up to the longest draft. Sampling uses the
    target's own noise, or independent noise if scores are kept for rejection sampling.
    """
    slots, starts, counts = (rows[:, column] for column in DraftColumn)
    mine, tables = jnp.clip(slots, 0, limits.slots - 1), rows[:, len(DraftColumn) :]
    last, before = tokens[mine, 0], history[mine, jnp.maximum(starts - 1, 0)]

    def drawn_at(hidden: jax.Array, ahead: Any, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        told, predicted = SamplingRows(drawn.at[:, Column.POSITION].add(ahead)), logits(weights, hidden)
        if scores.shape[1]:
            told = salted(told, GUESSED)
            scores = scores.at[slots, ahead].set(predicted, mode="drop")
        return jnp.maximum(draw(predicted, told, thresholds), 0), scores

    ids = jnp.maximum(jnp.stack([before, last], axis=1).reshape(-1), 0)
    ragged = _pairs(starts, counts > 0, tables, limits)
    hidden, pools = registry.forward(spec, weights, pools, ids, ragged, attention=pair)
    first, scores = drawn_at(hidden[1::2], 0, scores)
    drafted = jnp.zeros((rows.shape[0], limits.draft), jnp.int32).at[:, 0].set(first)
    State = tuple[jax.Array, list[Pool], jax.Array]

    def more(index: jax.Array, state: State) -> State:
        drafted, pools, scores = state
        ragged = _singles(starts + index, counts > index, tables, limits)
        hidden, pools = registry.forward(spec, weights, pools, drafted[:, index - 1], ragged, attention=attention)
        proposed, scores = drawn_at(hidden, index, scores)
        return drafted.at[:, index].set(proposed), pools, scores

    drafted, pools, scores = lax.fori_loop(1, jnp.max(counts), more, (drafted, pools, scores))
    return drafted_into(tokens, slots, drafted), pools, scores


def _pairs(starts: jax.Array, active: jax.Array, tables: jax.Array, limits: Limits) -> Ragged:
    """Describe two tokens of each active row: position `starts` [S] and the one before; active rows first."""
    rows, two = starts.shape[0], jnp.arange(2, dtype=jnp.int32)[None] - 1
    lengths = jnp.where(active, 2, 0).astype(jnp.int32)
    positions = jnp.where(active[:, None], starts[:, None] + two, 0)
    return _ragged(positions, lengths, jnp.where(active, starts + 1, 0), tables, limits, rows)


def _singles(starts: jax.Array, active: jax.Array, tables: jax.Array, limits: Limits) -> Ragged:
    """Describe one token of each active row, at `starts` [S]; active rows first."""
    lengths, rows = active.astype(jnp.int32), starts.shape[0]
    positions = jnp.where(active, starts, 0)[:, None]
    return _ragged(positions, lengths, jnp.where(active, starts + 1, 0), tables, limits, rows)


def _ragged(
    positions: jax.Array, lengths: jax.Array, contexts: jax.Array, tables: jax.Array, limits: Limits, rows: int
) -> Ragged:
    """Describe n tokens of each row that has any; positions [S, n]."""
    each = positions.shape[1]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    real = jnp.broadcast_to((lengths > 0)[:, None], positions.shape)
    page = jnp.take_along_axis(tables, positions // limits.page_size, axis=1)
    write = jnp.where(real, page * limits.page_size + positions % limits.page_size, limits.pages * limits.page_size)
    owners = jnp.where(real, row, rows)
    starts = jnp.minimum(row[:, 0] * each, jnp.sum(lengths, dtype=jnp.int32))
    ragged = Ragged(positions.reshape(-1), owners.reshape(-1), write.reshape(-1), starts, lengths, contexts, tables)
    fenced: Ragged = lax.optimization_barrier(ragged)
    return fenced
