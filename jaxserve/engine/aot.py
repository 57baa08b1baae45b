"""Whole steps for the compile gate: the engine's own programs, with weights that are only described.

`python -m pallas_kernels.aot` finds them by the name of this module; kernels know no engines, so they cannot be there.
To add a model: a line in MODELS, a line in SERVED, and its bounds (`--record`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine import kv
from jaxserve.engine.build import ExecutorConfig, random_init, resolve_attention
from jaxserve.engine.inputs import Bucket, Layout, Limits
from jaxserve.engine.mesh import plan_mesh
from jaxserve.engine.sampling import Column
from jaxserve.engine.step import Programs, Tree
from jaxserve.models import registry
from jaxserve.models.layers import Info
from jaxserve.models.spec import ModelSpec
from pallas_kernels.aot.cases import Step
from pallas_kernels.aot.targets import memory_of

ROWS, TOKENS = 256, 8192  # what an engine on a GPU has unless it is told otherwise
LENGTH = 8192  # tokens of the longest request
PAGE = 64
DTYPE = jnp.dtype(jnp.bfloat16)
SPARE = 6 << 30  # bytes left for temporaries; an engine measures them
BACKENDS = {"gpu": "mosaic_gpu", "tpu": "tpu"}  # named, because one that is named does not fall back

LLAMA3 = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 5e5}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "rope_theta": 1e6, "head_dim": 128}


def _model(family: dict[str, Any], dim: int, layers: int, heads: int, kv_heads: int, ff: int, **more: Any) -> ModelSpec:
    return registry.spec_from_config(
        {
            "hidden_size": dim,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": ff,
            "max_position_embeddings": LENGTH,
            **family,
            **more,
        }
    )


MODELS = {
    "llama3-8b": _model(LLAMA3, 4096, 32, 32, 8, 14336),
    "llama3-70b": _model(LLAMA3, 8192, 80, 64, 8, 28672),
    "qwen2.5-0.5b": _model(QWEN2, 896, 24, 14, 2, 4864, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-7b": _model(QWEN2, 3584, 28, 28, 4, 18944, vocab_size=152064),
    "qwen3-0.6b": _model(QWEN3, 1024, 28, 16, 8, 3072, tie_word_embeddings=True),
    "qwen3-32b": _model(QWEN3, 5120, 64, 64, 8, 25600),
}


class Served(NamedTuple):
    """A model on a mesh, and those of its steps that every run of the gate compiles."""

    model: str
    tp: int
    usual: tuple[str, ...] = ()


SERVED = (
    Served("llama3-8b", 1, ("decode", "prefill", "draw")),
    Served("qwen2.5-7b", 1, ("decode",)),
    Served("qwen3-0.6b", 1, ("decode",)),
    Served("llama3-8b", 4),
    Served("llama3-70b", 4),
    Served("qwen2.5-0.5b", 1),
    Served("qwen3-32b", 1),
    Served("qwen3-32b", 4),
)


def cases() -> list[Step]:
    """The largest decode step and the largest step with prompts of each, and drawing."""
    return [step for served in SERVED for step in _steps(served)]


def _steps(served: Served) -> Iterator[Step]:
    named = f"{served.model} tp{served.tp}"
    # One CUDA graph a step. Over several devices collectives are outside of it, unless XLA is asked to take them in.
    graphs = 1 if served.tp == 1 else None
    for kind, program, needs, buffers in (
        ("decode", _decode, frozenset({"tma"}), graphs),
        ("prefill", _prefill, frozenset({"tma", "wgmma"}), None),
        ("draw", _draw, frozenset[str](), graphs),
    ):
        yield Step(
            f"{named} {kind}",
            partial(program, served),
            served.tp,
            needs=needs,
            usual=kind in served.usual,
            command_buffers=buffers,
        )


@dataclass(frozen=True)
class Instance:
    """Programs of an instance, and descriptions of what they take."""

    programs: Programs
    weights: Tree
    pools: list[tuple[jax.ShapeDtypeStruct, ...]]
    whole: NamedSharding

    def plain(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """An array that every device holds."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)

    def step(self, bucket: Bucket) -> jax.stages.Lowered:
        limits = self.programs.limits
        packed = self.plain((Layout.of(bucket, limits.row_pages).end,))
        carry = self.plain((limits.slots,))
        lowered: jax.stages.Lowered = self.programs.step[bucket].lower(self.weights, self.pools, carry, packed)
        return lowered


def _instance(served: Served, mesh: Mesh) -> Instance:
    """As `build_executors` makes them, with as many pages as the devices have room for."""
    config = ExecutorConfig(
        MODELS[served.model],
        random_init(),
        plan_mesh(f"1x{served.tp}"),
        ROWS,
        TOKENS,
        LENGTH,
        page_size=PAGE,
        attention_backend=BACKENDS[mesh.devices.flat[0].platform],
    )
    spec = config.spec.for_tp(served.tp)
    weights = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(info.shape, DTYPE, sharding=NamedSharding(mesh, info.partition(served.tp))),
        registry.abstract_weights(spec, DTYPE),
        is_leaf=lambda leaf: isinstance(leaf, Info),
    )
    room = kv.device_pool_bytes(
        mesh,
        utilization=config.gpu_memory_utilization,
        weights=sum(prod(leaf.sharding.shard_shape(leaf.shape)) * DTYPE.itemsize for leaf in jax.tree.leaves(weights)),
        temporaries=SPARE,
        sharing=1,
        memory=memory_of(mesh.devices.flat[0].device_kind),
    )
    pages = kv.fit_pages(spec, PAGE, DTYPE, pool_bytes=room, max_model_len=LENGTH)
    limits = Limits(ROWS, TOKENS, pages, PAGE, LENGTH // PAGE, spec.vocab)
    part = jax.ShapeDtypeStruct(
        spec.cache.shape(pages, PAGE), DTYPE, sharding=NamedSharding(mesh, spec.cache.partition)
    )
    programs = Programs(spec, mesh, limits, resolve_attention(config, spec, DTYPE, mesh))
    return Instance(programs, weights, spec.cache.pools(part), NamedSharding(mesh, PartitionSpec()))


def _decode(served: Served, mesh: Mesh) -> jax.stages.Lowered:
    made = _instance(served, mesh)
    return made.step(max(bucket for bucket in made.programs.limits.buckets if bucket.decode))


def _prefill(served: Served, mesh: Mesh) -> jax.stages.Lowered:
    made = _instance(served, mesh)
    return made.step(max(bucket for bucket in made.programs.limits.buckets if not bucket.decode))


def _draw(served: Served, mesh: Mesh) -> jax.stages.Lowered:
    made = _instance(served, mesh)
    rows, carry = made.plain((ROWS, made.programs.spec.dim), DTYPE), made.plain((ROWS,))
    sampling = made.plain((ROWS, len(Column)))
    lowered: jax.stages.Lowered = made.programs.plain.lower(made.weights, rows, carry, sampling)
    return lowered
