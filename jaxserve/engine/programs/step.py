"""The programs of an instance: compute a step, sample its tokens, score a prompt, move pages.

A step is two programs, the model and the sampling, so that the numbers of T buckets and of sampling
variants add up instead of multiplying. Programs are traced once per model and mesh shape; jax then
compiles them for each instance's devices.

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, L layers, K kv heads,
D head dim (or tokens of a row that are verified), E model dim, V vocabulary, G sampling rows,
W tokens scored together, or words of a mask, M pages moved together, C logits processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.programs.backends import Backends
from jaxserve.engine.programs.inputs import FROM_CARRY, Bucket, Layout, Limits
from jaxserve.engine.programs.logprobs import logprobs_of
from jaxserve.engine.programs.pooling import pool
from jaxserve.engine.programs.processors import Processor, processed, several_told_apart, told_apart
from jaxserve.engine.programs.program import Program, bound
from jaxserve.engine.programs.sampling import Adjust, Column, SamplingRows, draw, draw_full, only_allowed
from jaxserve.engine.programs.speculate import last_of, noted, probabilistic, strict
from jaxserve.models import registry
from jaxserve.models.cache import Cache
from jaxserve.models.spec import ModelSpec
from pallas_kernels.attention.api import Attention, Pool
from pallas_kernels.layout import Ragged, SharedPrefixes
from pallas_kernels.ops.kv_pages.api import export_pages, import_pages
from pallas_kernels.ops.sampling_threshold.api import Thresholds

SCORED = 64  # W
Tree = Any
Logits = Callable[[Tree, jax.Array], jax.Array]  # weights, rows [G, E] -> [G, V]


class Carry(NamedTuple):
    """The device's record of each slot's text."""

    tokens: jax.Array  # [slots, 1 + max draft] int32: the last token, then those drafted after it
    history: jax.Array  # [slots, positions] int32: all tokens; no positions without drafting
    scores: jax.Array  # [slots, max draft, V] float32: the logits of drafted tokens; empty unless kept

    @classmethod
    def made(cls, limits: Limits, make: Callable[[tuple[int, ...], Any], Any]) -> Carry:
        """Create a carry with `make(shape, dtype)` for each array."""
        positions, guessed = limits.positions if limits.draft else 0, limits.draft if limits.scores else 0
        return cls(
            make((limits.slots, 1 + limits.draft), jnp.int32),
            make((limits.slots, positions), jnp.int32),
            make((limits.slots, guessed, limits.vocab), jnp.float32),
        )


class Programs:
    """The jitted functions of an instance, by bucket.

    Equal instances share one object, and with it traces and lowered programs. Results keep the
    sharding of the arguments: a sharding that only looks different would compile again.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        limits: Limits,
        backends: Backends | None = None,
        processors: Sequence[Processor] = (),
    ) -> None:
        """backends: the resolved kernels; None: XLA. processors: those of `limits.processors`."""
        self.spec = spec
        self.limits = limits
        backends = backends or Backends()
        self.attention, self.experts, self.products, self.sampling, self.mlp = (
            "xla" if backend is None else str(backend) for backend in backends
        )
        shape = mesh.abstract_mesh  # without devices, so that one trace serves every instance
        whole = NamedSharding(shape, PartitionSpec())
        pools = spec.cache.pools(NamedSharding(shape, spec.cache.partition))
        self.step: dict[Bucket, Program] = {}
        self.block: dict[int, Program] = {}
        self.pool: dict[int, Program] = {}
        for bucket in limits.buckets:
            kernel = backends.kernel(shape, decode=bucket.decode, few=bucket.verify)
            program = partial(_step, spec=spec, limits=limits, bucket=bucket, kernel=kernel)
            self.step[bucket] = Program(program, f"step_{bucket.tokens}_{bucket.rows}", (whole, pools, whole), (1,))
            if bucket.prompts:
                self.block[bucket.tokens] = Program(_block, f"block_{bucket.tokens}", whole)
                self.pool[bucket.tokens] = Program(pool, f"pool_{bucket.tokens}", whole)
        logits = partial(logits_of, spec=spec, whole=whole)
        given: dict[str, Any] = {
            "logits": logits,
            "thresholds": backends.thresholds(shape),
            "processors": tuple(processors),
        }
        self.draw = Program(partial(_draw, **given), "draw", (whole, whole), (2,))
        self.full = Program(partial(_full, **given), "draw_full", (whole,) * 4, (2, 3))
        self.pick = Program(_pick, "pick", whole)
        self.verify = Program(partial(_verify, **given), "verify", (whole, whole), (2,))
        self.masked = Program(partial(_draw, **given), "draw_masked", (whole, whole), (2,))
        self.masked_verify = Program(partial(_verify, **given), "verify_masked", (whole, whole), (2,))
        self.drafted = Program(_drafted, "drafted", whole)
        self.foresee = Program(_foresee, "foresee", whole, (0,))
        self.recall = Program(_recall, "recall", whole, (0,))
        self.score = Program(partial(_score, logits=logits), "score", whole)
        self.remember = Program(_remember, "remember", whole, (0,))
        self.moves = KVPrograms(spec.cache, shape)

    def bound(self) -> Programs:
        """Return the programs of one instance: each with executables of its own."""
        programs = bound(self)
        programs.moves = bound(self.moves)
        return programs


class KVPrograms:
    """Programs that gather pages from the pools of a cache, and scatter pages into them."""

    def __init__(self, cache: Cache, mesh: AbstractMesh) -> None:
        local = partial(jax.shard_map, mesh=mesh, check_vma=False)
        kv_buffer, held = cache.kv_buffer_partition, [(cache.partition,) * cache.parts] * cache.layers
        # Explicitly per shard, its own heads: XLA would allocate a whole KV buffer on every device.
        export = local(export_pages, in_specs=(held, PartitionSpec()), out_specs=kv_buffer)
        fill = local(import_pages, in_specs=(held, PartitionSpec(), kv_buffer), out_specs=held)
        self.gather = Program(export, "gather", NamedSharding(mesh, kv_buffer))
        sharding = NamedSharding(mesh, cache.partition)
        self.scatter = Program(fill, "scatter", [(sharding,) * cache.parts] * cache.layers, (0,))
        states = 0 if cache.state is None else sum(cache.state.layers)
        self.take = Program(_take_state, "take_state", (sharding, sharding))
        self.put = Program(_put_state, "put_state", [(sharding, sharding)] * states, (0,))


class EmptyPools:
    """Allocates the empty pools of an instance: per layer the arrays of its cache.

    It calls one program per array: a program that returned all of them would need twice the memory.
    """

    def __init__(self, cache: Cache, mesh: Mesh, limits: Limits, dtype: Any) -> None:
        self.dtype = dtype  # of the pages
        self._cache = cache
        self._sharding = NamedSharding(mesh, cache.partition)
        state = () if cache.state is None else cache.state.shapes(limits.slots, cache.heads_first)
        pages = cache.shape(limits.pages, limits.page_size)
        self._arrays = [(pages, dtype), *((shape, jnp.float32) for shape in state)]
        self.program, *self.states = (
            Program(partial(jnp.zeros, *array), "empty_pool", self._sharding) for array in self._arrays
        )

    @property
    def described(self) -> list[Any]:
        """Abstract arrays in place of those that a call returns."""
        page, *state = (jax.ShapeDtypeStruct(*array, sharding=self._sharding) for array in self._arrays)
        return self._cache.pools(page, state)

    def __call__(self) -> list[Pool]:
        made: list[Pool] = jax.tree.map(lambda program: program(), self._cache.pools(self.program, self.states))
        return made


def _take_state(states: list[Pool], slot: jax.Array) -> Pool:
    """Return what the layers with a state keep of a slot, each of their arrays stacked over layers."""
    return tuple(jnp.stack([array[slot] for array in arrays]) for arrays in zip(*states, strict=True))


def _put_state(states: list[Pool], slot: jax.Array, given: Pool) -> list[Pool]:
    """Replace what the layers with a state keep of a slot by the result of `_take_state`."""
    return [
        tuple(array.at[slot].set(mine[layer]) for array, mine in zip(state, given, strict=True))
        for layer, state in enumerate(states)
    ]


def _step(
    weights: Tree,
    pools: list[Pool],  # L x what `spec.cache` says
    carry: jax.Array,  # `Carry.tokens`
    packed: jax.Array,  # [Layout.end] int32
    *,
    spec: ModelSpec,
    limits: Limits,
    bucket: Bucket,
    kernel: Attention,
) -> tuple[jax.Array, list[Pool], jax.Array]:
    """Return hidden states of the rows' last tokens [G, E], the pools, and all hidden states [T, E]."""
    tokens, ragged, last = unpack(packed, carry, bucket, limits, stateful=spec.delta is not None)
    hidden, pools = registry.forward(spec, weights, pools, tokens, ragged, attention=kernel)
    return gathered(hidden, last, bucket), pools, hidden


def gathered(hidden: jax.Array, last: jax.Array, bucket: Bucket) -> jax.Array:
    """Gather the rows' last tokens [G, E] from hidden [T, E]."""
    rows = hidden if bucket.decode else hidden[last]  # [S, E]
    return jnp.pad(rows, ((0, bucket.width - bucket.rows), (0, 0)))


def unpack(
    packed: jax.Array, carry: jax.Array, bucket: Bucket, limits: Limits, *, stateful: bool = False
) -> tuple[jax.Array, Ragged, jax.Array]:
    """Unpack tokens [T], their `Ragged`, and the index in [T] of each row's last token [S].

    stateful: with the slots of rows, for layers that keep a state of each.

    KV write positions are computed here from the rows, which is cheaper than sending them.
    """
    at = Layout.of(bucket, limits)
    starts, lengths = packed[at.starts : at.lengths], packed[at.lengths : at.contexts]
    contexts, slots = packed[at.contexts : at.slots], packed[at.slots : at.last]
    tables = packed[at.tables : at.sharing].reshape(bucket.rows, limits.row_pages)
    index = jnp.arange(bucket.tokens, dtype=jnp.int32)  # [T]
    rows = jnp.sum((starts + lengths)[None, :] <= index[:, None], axis=1, dtype=jnp.int32)  # [T], S for padding
    real, row = rows < bucket.rows, jnp.minimum(rows, bucket.rows - 1)
    positions = jnp.where(real, contexts[row] - lengths[row] + index - starts[row], 0)
    page = tables[row, positions // limits.page_size]
    write = jnp.where(real, page * limits.page_size + positions % limits.page_size, limits.pages * limits.page_size)
    tokens = packed[: at.starts]
    tokens = jnp.where(tokens <= FROM_CARRY, carry[slots[row], jnp.maximum(FROM_CARRY - tokens, 0)], tokens)
    shared = None
    if limits.groups(bucket):
        pages = packed[at.shared : at.end]
        shared = SharedPrefixes(
            packed[at.sharing : at.leaders], packed[at.leaders : at.shared], pages, pages * limits.page_size
        )
    states = jnp.where(lengths > 0, slots, limits.slots) if stateful else None
    ragged = Ragged(positions, rows, write, starts, lengths, contexts, tables, shared, states)
    # Without the barrier, XLA fuses slices of `packed` into the kernels that read them and leaves these fusions out
    # of the step's CUDA graph, which would split it at every layer.
    return tokens, lax.optimization_barrier(ragged), packed[at.last : at.tables]


def logits_of(weights: Tree, rows: jax.Array, *, spec: ModelSpec, whole: NamedSharding) -> jax.Array:
    """Compute logits [G, V], replicated: sampling a sharded vocabulary would communicate every time.

    Each device first computes its share of the vocabulary. With the replicated result as the only
    constraint, XLA would gather the head instead, a gigabyte or more in every step.
    """
    share = NamedSharding(whole.mesh, PartitionSpec(None, "tp"))
    logits: jax.Array = lax.with_sharding_constraint(registry.logits(spec, weights, rows), share)
    logits = lax.with_sharding_constraint(logits, whole)
    return logits


def extras(masks: Any, arguments: Any) -> tuple[Any, ...]:
    """Return the last arguments of a program that samples: none without masks and logits processors."""
    if arguments is not None:
        return masks, arguments
    return () if masks is None else (masks,)


def _draw(
    weights: Tree,
    rows: jax.Array,
    carry: Carry,
    sampling: jax.Array,
    masks: jax.Array | None = None,
    arguments: jax.Array | None = None,
    *,
    logits: Logits,
    thresholds: Thresholds,
    processors: Sequence[Processor],
) -> tuple[jax.Array, Carry]:
    """Sample: rows [G, E], sampling [G, len(Column)] -> tokens [G], carry.

    masks [G, W]: the tokens that rows may sample; None: all. arguments [G, C]: see `processed`; None: of none.
    """
    told = SamplingRows(sampling)
    scores = logits(weights, rows)
    tokens = draw(_limited(scores, masks, arguments, processors), told, thresholds)
    if arguments is not None:
        tokens = told_apart(tokens, scores)
    return tokens, _carried(carry, told, tokens)


def _limited(
    logits: jax.Array, masks: jax.Array | None, arguments: jax.Array | None, processors: Sequence[Processor]
) -> jax.Array:
    """Apply logits processors, and masks after them: no processor can allow what a mask does not."""
    if arguments is not None:
        logits = processed(logits, arguments, processors)
    return logits if masks is None else only_allowed(logits, masks)


def _full(
    weights: Tree,
    rows: jax.Array,
    carry: Carry,
    counts: jax.Array,
    sampling: jax.Array,
    ids: jax.Array,
    values: jax.Array,
    used: jax.Array,
    masks: jax.Array | None = None,
    arguments: jax.Array | None = None,
    *,
    logits: Logits,
    thresholds: Thresholds,
    processors: Sequence[Processor],
) -> tuple[jax.Array, Carry, jax.Array, jax.Array]:
    """Sample with token counts [slots, V] and an Adjust -> tokens, carry, counts, log-probabilities.

    masks [G, W], arguments [G, C]: as of `_draw`.
    """
    told, adjust = SamplingRows(sampling), Adjust(ids, values, used)
    scores = logits(weights, rows)
    changed = None if arguments is None else processed(scores, arguments, processors)
    tokens, logprobs, counts = draw_full(scores, told, adjust, counts, thresholds, masks, changed)
    if arguments is not None:
        tokens = told_apart(tokens, scores)
    return tokens, _carried(carry, told, tokens), counts, logprobs


def _verify(
    weights: Tree,
    rows: jax.Array,
    carry: Carry,
    sampling: jax.Array,
    lengths: jax.Array,
    masks: jax.Array | None = None,
    arguments: jax.Array | None = None,
    *,
    logits: Logits,
    thresholds: Thresholds,
    processors: Sequence[Processor],
) -> tuple[jax.Array, Carry]:
    """Verify rows [G * D, E] with `lengths` [G] drafted tokens -> tokens [G, D] as from `strict`, carry.

    masks [G * D, W], arguments [G, C]: as of `_draw`.
    """
    told = SamplingRows(sampling)
    depth = rows.shape[0] // sampling.shape[0] - 1
    slots = jnp.clip(told.ints(Column.SLOT), 0, carry.tokens.shape[0] - 1)
    draft = carry.tokens[slots, 1 : 1 + depth]
    if arguments is not None:
        arguments = jnp.repeat(arguments, 1 + depth, axis=0)
    raw = logits(weights, rows)
    scores = _limited(raw, masks, arguments, processors)
    if carry.scores.shape[1]:
        tokens = probabilistic(scores, sampling, draft, lengths, carry.scores[slots, :depth], thresholds)
    else:
        tokens = strict(scores, sampling, draft, lengths, thresholds)
    if arguments is not None:
        tokens = several_told_apart(tokens, raw)
    return tokens, _carried(carry, told, last_of(tokens), tokens)


def _drafted(tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """Return the drafted tokens of `slots` [G], [G, K], from `Carry.tokens`."""
    return tokens[jnp.clip(slots, 0, tokens.shape[0] - 1), 1:]


def _foresee(tokens: jax.Array, slots: jax.Array, forced: jax.Array) -> jax.Array:
    """Replace the drafted tokens of `slots` [G] in `Carry.tokens` by forced [G, K]; those below 0 stay."""
    mine = tokens[jnp.clip(slots, 0, tokens.shape[0] - 1), 1:]
    return tokens.at[slots, 1:].set(jnp.where(forced >= 0, forced, mine), mode="drop")


def _carried(carry: Carry, told: SamplingRows, last: jax.Array, tokens: jax.Array | None = None) -> Carry:
    """Update the carry with the last token [G] of each row, and its history with all it gained [G, D]."""
    history = noted(carry.history, told, last[:, None] if tokens is None else tokens)
    kept = carry.tokens.at[told.ints(Column.SLOT), 0].set(jnp.maximum(last, 0), mode="drop")
    return carry._replace(tokens=kept, history=history)


def _pick(hidden: jax.Array, index: jax.Array) -> jax.Array:
    """Select rows `index` [G * D] of hidden [T, E]."""
    return jnp.take(hidden, index, axis=0, mode="clip")


def _recall(carry: Carry, slot: jax.Array, row: jax.Array) -> Carry:
    """Store the text [positions] of a request that starts in `slot`."""
    return carry._replace(history=carry.history.at[slot].set(row))


def _score(weights: Tree, rows: jax.Array, targets: jax.Array, *, logits: Logits) -> jax.Array:
    """Score given next tokens: rows [W, E], targets [W] -> as `logprobs_of`."""
    return logprobs_of(logits(weights, rows), targets)


def _block(hidden: jax.Array, begin: jax.Array) -> jax.Array:
    """Return W rows of hidden [T, E] from `begin`; the last one repeats if there are fewer."""
    return jnp.take(hidden, begin + jnp.arange(SCORED, dtype=jnp.int32), axis=0, mode="clip")


def _remember(counts: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    """Replace one row [V] of counts [slots, V]."""
    return counts.at[slot].set(row)
