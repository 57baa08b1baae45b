"""Construction of warm executors, one per instance, from a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.cache_folder import cache_folder
from jaxserve.engine.memory import kv, room
from jaxserve.engine.memory.calibrate import with_kv_scales
from jaxserve.engine.programs.backends import Backends, resolve_backends
from jaxserve.engine.programs.inputs import LADDER, Limits, SlotTable
from jaxserve.engine.programs.mesh import MeshPlan, sub_meshes
from jaxserve.engine.programs.processors import Processor
from jaxserve.engine.programs.sampling import ADJUSTED
from jaxserve.engine.programs.segments import Segments, outside
from jaxserve.engine.programs.step import Carry, EmptyPools, Programs, Tree, extras
from jaxserve.engine.runtime.device_state import DeviceState
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.segment_pace import UNKNOWN
from jaxserve.engine.speculation.draft_model import DraftModel, DraftPrograms
from jaxserve.engine.speculation.drafters import Drafter, NGram
from jaxserve.engine.startup.calls import idle_batch
from jaxserve.engine.startup.compiled import use_persistent_cache
from jaxserve.engine.startup.environment import reserved_share
from jaxserve.engine.startup.executables import Executables, Shipped, facts_of, remembered
from jaxserve.engine.startup.warmup import Ladder, Progress
from jaxserve.models import converted, dummy, manifest, weights
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.preemption import SHORT, SHORT_ON_CPU, Boundary
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.settings.speculative import Speculative
from jaxserve.structured.compiler import Compiler
from jaxserve.structured.token_filter import words

log = logging.getLogger(__name__)

# (spec, dtype, meshes) -> one weight tree per mesh.
LoadWeights = Callable[[ModelSpec, Any, Sequence[Mesh]], list[Tree]]


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The settings that all instances of a process share."""

    spec: ModelSpec  # of the whole model, before it is split for the mesh
    load: LoadWeights
    mesh: MeshPlan
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype: str = "auto"  # see `auto_dtype`
    kv_cache_dtype: str = "auto"  # as `dtype`, or one of `kv.STORED`
    page_size: int = 16
    kv_cache_memory: int | None = None  # bytes of all pools together; None: see `kv`
    gpu_memory_utilization: float = 0.9
    share_devices: bool = False
    attention_backend: str = "auto"  # see `pallas_kernels.attention.api.resolve`
    experts_backend: str = "auto"  # the same for the mixture of experts
    products_backend: str = "auto"  # the same for matmuls with 8-bit weights
    sampling_backend: str = "auto"  # the same for thresholds of top-k, top-p and min-p
    mlp_backend: str = "auto"  # the same for the first product of dense feed-forwards
    cascade_attention: str = "off"  # see `Backends.cascade`
    preempt_boundary: str = "chunk"  # see `Boundary`
    suspended: int = 4  # largest number of suspended steps: memory is reserved for them
    ladder: tuple[int, ...] = LADDER  # see `Limits`; other ones are for benchmarks
    interpret: bool = False  # tests only: run an accelerator's kernels in jax's interpreters on a CPU
    persistent_cache: bool = True
    cache_folder: Path | None = None  # None: see `compiled.use_persistent_cache`
    shipped: Shipped | None = None  # executables of `jaxserve compile`
    warm: bool = True
    exchanges: bool = False  # pages go to other processes, and come from them
    speculative: Speculative | None = None
    draft: ModelSpec | None = None  # the whole draft model, if there is one
    load_draft: LoadWeights | None = None
    compiler: Compiler | None = None  # for structured outputs; None: executors refuse them
    markers: ThinkingMarkers | None = None  # of the model's thinking
    processors: Mapping[str, Processor] = field(default_factory=dict)  # logits processors by name, in order

    def __post_init__(self) -> None:
        Boundary.parse(self.preempt_boundary)
        if self.draft is not None:
            check_draft(self.draft, self.spec, self.max_model_len)
        if self.max_model_len > self.spec.max_positions:
            raise InvalidValue(
                f"max_model_len={self.max_model_len} is above the model's {self.spec.max_positions} positions",
                "max_model_len",
            )

    @property
    def draft_spec(self) -> ModelSpec | None:
        """The draft model, split for this mesh."""
        return None if self.draft is None else self.draft.for_tp(self.mesh.tp)


def check_draft(draft: ModelSpec, spec: ModelSpec, max_model_len: int) -> None:
    """Raise InvalidValue if one model cannot draft for the other."""
    if draft.vocab != spec.vocab:
        raise InvalidValue(
            f"the draft model has a vocabulary of {draft.vocab} tokens, the model {spec.vocab}: a draft model must "
            "share the model's tokenizer",
            "speculative_config",
        )
    if draft.max_positions < max_model_len:
        raise InvalidValue(
            f"the draft model has {draft.max_positions} positions, fewer than {max_model_len=}: lower max_model_len",
            "speculative_config",
        )


def from_folder(path: Path, load_format: str = "auto", progress: Progress | None = None) -> LoadWeights:
    """Return a loader of a Hugging Face folder, or of one made by `jaxserve convert`; auto: either.

    progress: called with the numbers of parameters (or parts) loaded and in total.
    """

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total, "weights")

    def load(spec: ModelSpec, dtype: Any, meshes: Sequence[Mesh]) -> list[Tree]:
        orbax = load_format == "orbax" or (load_format == "auto" and manifest.find(path) is not None)
        return (converted.load if orbax else weights.load_weights)(path, spec, dtype, meshes, progress=told)

    return load


def random_init(seed: int = 0) -> LoadWeights:
    """Return a loader of random weights (`--load-format dummy`)."""
    return lambda spec, dtype, meshes: dummy.random_weights(spec, dtype, meshes, seed=seed)


def auto_dtype(device: jax.Device) -> str:
    """Return the data type of weights and activations on a device: float32 on CPU, bfloat16 on accelerators.

    GPUs before Ampere (compute capability 8.0), such as the T4, have tensor cores for float16 only.
    """
    if device.platform == "cpu":
        return "float32"
    capability = str(getattr(device, "compute_capability", ""))
    return "float16" if capability and float(capability) < 8.0 else "bfloat16"


@dataclass(frozen=True)
class Resolved:
    """What the programs of an instance are made from: a config, and what it leaves to the devices."""

    config: ExecutorConfig
    spec: ModelSpec  # split for the mesh, laid out for its platform
    backends: Backends
    limits: Limits
    mesh: Mesh  # of one instance
    dtype: Any  # of weights and activations

    @property
    def stored(self) -> Any:
        """The data type of the pools."""
        return kv.pool_dtype(self.config.kv_cache_dtype, self.dtype)

    @property
    def keeps(self) -> bool:
        """Whether programs and their sizes are kept for the next start.

        Logits processors are code of the user, which no digest covers; several hosts would have to agree on what each
        has.
        """
        return self.config.persistent_cache and not self.config.processors and jax.process_count() == 1

    @property
    def facts(self) -> dict[str, Any]:
        """What determines the programs."""
        return facts_of(
            self.mesh.devices.flat[0],
            spec=repr(self.spec),
            draft=repr(self.config.draft_spec),
            limits=repr(self.limits),
            backends=repr(self.backends),
            mesh=repr(self.mesh.abstract_mesh),
            dtypes=[str(self.dtype), str(self.stored)],
            preempt=self.config.preempt_boundary,
            speculative=repr(self.config.speculative),
            interpret=self.config.interpret,
        )

    @property
    def folder(self) -> Path:
        """The folder of what is kept."""
        return self.config.cache_folder or cache_folder()

    def programs(self) -> Programs:
        """Create the programs of steps, which equal instances share."""
        return Programs(self.spec, self.mesh, self.limits, self.backends, tuple(self.config.processors.values()))

    def segments(self) -> Segments | None:
        """Create the programs of preemptible steps; None without preemption inside of them."""
        boundary = Boundary.parse(self.config.preempt_boundary)
        short = SHORT_ON_CPU if self.mesh.devices.flat[0].platform == "cpu" else SHORT
        return Segments(self.spec, self.mesh, self.limits, boundary, self.backends, short) if boundary.layers else None


def build_executors(config: ExecutorConfig, progress: Progress | None = None) -> list[JaxExecutor]:
    """Build one warm executor per instance, in the order of `config.mesh.roles`."""
    return build_early(config, progress, early=False)[0]


def build_early(
    config: ExecutorConfig, progress: Progress | None = None, *, early: bool = True
) -> tuple[list[JaxExecutor], Ladder | None]:
    """Build one executor per instance, in the order of `config.mesh.roles`, and their programs.

    early: the executors can compute anything when this returns, and `Ladder.climb` makes the other programs. Engines
    that draft make all programs first. The ladder is None without warm-up.
    """
    if config.persistent_cache:
        use_persistent_cache(config.cache_folder)
    meshes = sub_meshes(config.mesh, share_devices=config.share_devices)
    platform = meshes[0].devices.flat[0].platform
    spec = _laid_out(config, config.spec.for_tp(config.mesh.tp), platform)
    spec = replace(spec, kv_scales=kv.scaled(config.kv_cache_dtype))
    dtype = jnp.dtype(auto_dtype(meshes[0].devices.flat[0]) if config.dtype == "auto" else config.dtype)
    room.check_weights(spec, dtype, meshes)
    trees = config.load(spec, dtype, meshes)
    if spec.kv_scales:
        trees = with_kv_scales(spec, trees, meshes, kv.pool_dtype(config.kv_cache_dtype, dtype))
    resolved = _with_pages(resolve(config, spec, meshes[0], dtype), meshes, trees[0])
    device_states = states(resolved, meshes, trees)
    ladder, ready = None, None
    if config.warm:
        kept = Executables(resolved.folder, resolved.facts, config.shipped) if resolved.keeps else None
        ladder = Ladder(device_states, kept, early=early and config.speculative is None, exchanges=config.exchanges)
        ladder.begin(progress)
        ready = ladder.first.buckets
    else:
        for state in device_states:
            state.rebuild()
    executors = [
        JaxExecutor(f"{role.value}-{i}", state, config.compiler, config.markers, ready)
        for i, (role, state) in enumerate(zip(config.mesh.roles, device_states, strict=True))
    ]
    return executors, ladder


def resolve(config: ExecutorConfig, spec: ModelSpec, mesh: Mesh, dtype: Any) -> Resolved:
    """Choose the backends and limits of instances that have as many pages as one request needs."""
    backends = resolve_backends(config, spec, dtype, mesh)
    spec = backends.pooled(spec)
    pages = -(-config.max_model_len // config.page_size)
    limits = Limits(
        slots=config.max_num_seqs,
        tokens=config.max_num_batched_tokens,
        pages=pages,
        page_size=config.page_size,
        row_pages=pages,
        vocab=spec.vocab,
        draft=0 if config.speculative is None else config.speculative.num_speculative_tokens,
        scores=config.speculative is not None and config.speculative.rejection_sample_method == "probabilistic",
        ladder=config.ladder,
        cascade=backends.cascade(config.cascade_attention),
        processors=tuple(config.processors),
    )
    return Resolved(config, spec, backends, limits, mesh, dtype)


def states(
    resolved: Resolved, meshes: Sequence[Mesh], trees: Sequence[Tree], kind: type[DeviceState] = DeviceState
) -> list[DeviceState]:
    """Return the states of equal instances on `meshes`, with one weight tree each, which share their traces."""
    programs, segments = resolved.programs(), resolved.segments()
    each = zip(meshes, trees, _drafters(resolved, meshes), strict=True)
    return [kind(programs, mesh, tree, resolved.stored, segments, drafter) for mesh, tree, drafter in each]


def _laid_out(config: ExecutorConfig, spec: ModelSpec, platform: str) -> ModelSpec:
    """Return the spec with weights laid out for the platform; interpreted kernels read them as on an accelerator."""
    cpu = platform == "cpu" and not config.interpret
    return replace(spec, transposed=cpu, whole=cpu and config.mesh.tp == 1)


def _drafters(resolved: Resolved, meshes: Sequence[Mesh]) -> list[Drafter | None]:
    """Return one drafter per instance, or None for each without speculation."""
    config, limits, dtype = resolved.config, resolved.limits, resolved.dtype
    asked, draft = config.speculative, config.draft_spec
    if asked is None:
        return [None] * len(meshes)
    if draft is not None:
        assert config.load_draft is not None
        draft = _laid_out(config, draft, meshes[0].devices.flat[0].platform)
        plain = replace(config, kv_cache_dtype="auto")  # its pools use the model's dtype: there are no scales for them
        backends = resolve_backends(plain, draft, dtype, meshes[0])
        programs = DraftPrograms(backends.pooled(draft), meshes[0], limits, backends)
        trees = config.load_draft(draft, dtype, meshes)
        return [DraftModel(programs, mesh, tree, dtype) for mesh, tree in zip(meshes, trees, strict=True)]
    least, most = asked.lookup
    return [NGram(mesh, limits, least=least, most=most) for mesh in meshes]


def _with_pages(resolved: Resolved, meshes: Sequence[Mesh], tree: Tree) -> Resolved:
    """Give each instance as many pages as fit beside its weights, the largest step and what preemption needs."""
    config, dtype, device = resolved.config, resolved.dtype, resolved.mesh.devices.flat[0]
    name = "kv_cache_memory"
    if device.platform == "cpu" or config.kv_cache_memory is not None:
        size = kv.cpu_pool_bytes(config.kv_cache_memory, len(meshes))
    else:
        name = "gpu_memory_utilization"
        needed = temporaries(resolved, tree)
        if (segments := resolved.segments()) is not None:  # activations of suspended steps and segments
            needed += (config.suspended + UNKNOWN + 1) * segments.held_bytes(outside(tree))
        size = kv.device_pool_bytes(
            resolved.mesh,
            utilization=config.gpu_memory_utilization,
            weights=_bytes(tree) + _draft_bytes(config, dtype),
            temporaries=needed,
            sharing=sum(device in mesh.devices.flat for mesh in meshes),
            reserved=reserved_share() if device.platform == "gpu" else 1.0,
        )
    draft = config.draft_spec
    pages = kv.fit_pages(
        resolved.spec,
        config.page_size,
        resolved.stored,
        pool_bytes=kv.without_states(resolved.spec, config.max_num_seqs, size),
        max_model_len=config.max_model_len,
        name=name,
        more=0 if draft is None else kv.page_bytes(draft, config.page_size, dtype),
    )
    return replace(resolved, limits=replace(resolved.limits, pages=pages))


def _bytes(tree: Tree) -> int:
    """Return the bytes of the weights on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def _draft_bytes(config: ExecutorConfig, dtype: Any) -> int:
    """Bound the bytes of the draft model's weights on one device, as if none were sharded."""
    return 0 if config.draft_spec is None else room.weight_bytes(config.draft_spec, dtype, 1)


def temporaries(resolved: Resolved, tree: Tree) -> int:
    """Return the bytes per device that the largest step needs beyond weights and pool, token counts included.

    As measured on three compiled programs, now or at an earlier start, independently of the pool's size.
    """
    if resolved.keeps:
        return remembered(resolved.folder, resolved.facts, lambda: _measured(resolved, tree))
    return _measured(resolved, tree)


def _measured(resolved: Resolved, tree: Tree) -> int:
    spec, mesh, limits, dtype = resolved.spec, resolved.mesh, resolved.limits, resolved.dtype
    programs, slots = resolved.programs(), SlotTable(limits)
    whole = NamedSharding(mesh, PartitionSpec())

    def described(shape: tuple[int, ...], kind: Any, sharding: Any = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)

    pools = EmptyPools(spec.cache, mesh, limits, resolved.stored).described
    carry, bucket = Carry.made(limits, described), limits.buckets[-1]
    batch = idle_batch(bucket, slots, full=True)
    step = programs.step[bucket].lower(tree, pools, carry.tokens, batch.packed).compile()
    rows = described((bucket.width, spec.dim), dtype)
    counts = described((limits.slots, limits.vocab), jnp.int16)
    adjust = described((bucket.width, ADJUSTED), jnp.int32), described((bucket.width, ADJUSTED), jnp.float32)
    masks = described((bucket.width, words(spec.vocab)), jnp.int32)
    full = (tree, rows, carry, counts, batch.sampling, *adjust, described((), jnp.int32))
    draw = programs.full.lower(*full, *extras(masks, batch.arguments)).compile()
    largest = max(_temporary(step), _temporary(draw))
    if limits.draft:
        several = described((bucket.width * (1 + limits.depths[-1]), spec.dim), dtype)
        lengths = described((bucket.width,), jnp.int32)
        given = tree, several, carry, batch.sampling, lengths, *extras(None, batch.arguments)
        verify = programs.verify.lower(*given).compile()
        largest = max(largest, _temporary(verify))
    return largest + limits.slots * limits.vocab * int(counts.dtype.itemsize)


def _temporary(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
