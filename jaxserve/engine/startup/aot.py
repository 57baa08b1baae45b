"""Cases of the compile gate for whole steps: the engine's own programs with abstract weights.

`python -m pallas_kernels.gate` finds them by the name of this module, because kernels must not
import the engine. To add a model: a line in SERVED, a line in configs/model/published.yaml, and its
bounds (`--record`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxserve.engine.memory import kv
from jaxserve.engine.programs.inputs import Bucket
from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.programs.sampling import ADJUSTED, Adjust, Column, SamplingRows, draw, draw_full, only_allowed
from jaxserve.engine.programs.step import Tree
from jaxserve.engine.runtime.device_state import DeviceState
from jaxserve.engine.speculation.drafters import Call
from jaxserve.engine.startup.build import ExecutorConfig, Resolved, random_init, resolve, states
from jaxserve.engine.startup.calls import drafting_calls, draw_calls, inner_calls, step_calls
from jaxserve.models import registry
from jaxserve.models.layers import Info, Part
from jaxserve.models.published import published_spec
from jaxserve.settings.speculative import Speculative
from jaxserve.structured.token_filter import words
from pallas_kernels.gate.cases import Case, Step, shapes
from pallas_kernels.gate.targets import GB, memory_of
from pallas_kernels.ops.sampling_threshold.api import MosaicThresholds, ThresholdSpec

ROWS, TOKENS = 256, 8192  # the defaults of an engine on a GPU
LENGTH = 8192  # tokens of the longest request
PAGE = 64
DTYPE = jnp.dtype(jnp.bfloat16)
SPARE = 6 << 30  # bytes reserved for temporaries, which an engine measures
BACKENDS = {"gpu": "mosaic_gpu", "tpu": "tpu"}  # named explicitly, so that they do not fall back
EXPERTS = {"mosaic_gpu": "mosaic_gpu", "tpu": "xla"}
COLLECTIVES = "--xla_gpu_enable_command_buffer=+COLLECTIVES"  # for XLA_FLAGS: include collectives in CUDA graphs


class Served(NamedTuple):
    """A published model on a mesh, and the steps that every run of the gate compiles."""

    model: str
    tp: int
    usual: tuple[str, ...] = ()
    rows: int = ROWS
    segments: bool = False  # also the segments of a preemptible step: a layer, and each of its halves
    draft: int = 0  # tokens that a row may draft, by n-gram
    quantization: str | None = None  # of the weights, as for --quantization
    wanted: tuple[str, ...] = ()  # steps to compile; (): all
    layers: int | None = None  # only the first layers, if all of them would take CI too long
    graphed: bool = False  # include collectives in CUDA graphs
    gated: bool = False  # gate, up and SwiGLU in one kernel, which is not the default
    cascade: bool = False  # read shared prefixes once
    memory: int = 0  # bytes of a device that holds it: on smaller ones its steps are not compiled


SERVED = (
    Served("llama3-8b", 1, ("decode", "prefill", "draw", "segment layer"), segments=True),
    Served("llama3-8b", 1, ("verify", "judge"), draft=4),
    Served("llama3-8b", 1, ("decode",), wanted=("decode",), gated=True),
    Served("llama3-8b", 1, draft=4, wanted=("verify",), gated=True),
    Served("llama3-8b", 1, ("decode",), wanted=("decode", "prefill"), cascade=True),
    Served("llama3-8b", 1, draft=4, wanted=("verify",), cascade=True),
    Served("llama3-8b", 1, ("decode",), quantization="fp8_per_block"),
    Served("qwen2.5-7b", 1, ("decode",)),
    Served("qwen3-0.6b", 1, ("decode",)),
    Served("gemma3-1b", 1, ("decode",)),
    Served("opt-6.7b", 1, ("decode",)),
    Served("qwen3-30b-a3b", 1, ("decode",)),
    Served("deepseek-v2-lite", 1, ("decode",)),
    Served("qwen3-30b-a3b", 1, quantization="fp8_per_block", wanted=("decode",)),
    Served("deepseek-v2-lite", 1, quantization="int8", wanted=("decode",)),
    Served("qwen3-30b-a3b", 1, quantization="fp8_per_block", wanted=("prefill",), layers=4),
    Served("deepseek-v2-lite", 1, quantization="int8", wanted=("prefill",), layers=4),
    Served("gpt-oss-20b", 1, ("decode",)),
    Served("minimax-m2", 4, ("decode",), layers=4),
    Served("gemma2-9b", 1, wanted=("decode",), layers=4),
    Served("gemma3-4b", 1, wanted=("decode",), layers=8),
    Served("glm4-9b", 1, wanted=("decode",), layers=4),
    Served("glm4-9b-chat", 1, wanted=("decode",), layers=4),
    Served("deepseek-v3", 8, wanted=("decode",), layers=4),
    Served("granite3.3-8b", 1, wanted=("decode",), layers=4),
    Served("mistral-7b", 1, wanted=("decode",), layers=4),
    Served("mixtral-8x7b", 1, wanted=("decode",), layers=4),
    Served("olmo2-7b", 1, wanted=("decode",), layers=4),
    Served("olmo3-7b", 1, wanted=("decode",), layers=4),
    Served("phi4", 1, wanted=("decode",), layers=4),
    Served("smollm3-3b", 1, wanted=("decode",), layers=8),
    Served("qwen3-next-80b-a3b", 4, wanted=("decode",), layers=4),
    Served("qwen3-30b-a3b", 4, layers=4),
    Served("llama3-8b", 4),
    Served("llama3-8b", 4, ("decode",), wanted=("decode",), graphed=True),
    Served("llama3-8b", 4, wanted=("decode",), gated=True),
    Served("llama3-70b", 4),
    Served("qwen2.5-0.5b", 1),
    Served("qwen3-32b", 1, memory=141 * GB),
    Served("qwen3-32b", 4),
)


VOCABULARY = 128256  # of Llama 3
# How often all logits may be read or written: with cuts, with masks and cuts, and with all parameters.
CUTS, MASKED, FULLY = 6, 6, 15


def cases() -> list[Case | Step]:
    """Return the steps of each model, and sampling from given logits, without the head."""
    steps = [step for served in SERVED for step in served_steps(served)]
    return [*steps, _cuts(VOCABULARY), _masked(VOCABULARY), _fully(VOCABULARY)]


def _cuts(vocab: int) -> Case:
    """Build the case of sampling by top-k, top-p and min-p."""

    def draw_cut(logits: jax.Array, packed: jax.Array) -> jax.Array:
        return draw(logits, SamplingRows(packed), MosaicThresholds(ThresholdSpec(vocab, platform="gpu")))

    return Case(
        name=f"draw with cuts llama3 r{ROWS}",
        program=draw_cut,
        arguments=shapes(((ROWS, vocab), jnp.float32), ((ROWS, len(Column)), jnp.int32)),
        most_moved=CUTS * 4 * ROWS * vocab,
    )


def _masked(vocab: int) -> Case:
    """Build the case of sampling among the tokens that structured outputs allow."""

    def draw_masked(logits: jax.Array, packed: jax.Array, masks: jax.Array) -> jax.Array:
        thresholds = MosaicThresholds(ThresholdSpec(vocab, platform="gpu"))
        return draw(only_allowed(logits, masks), SamplingRows(packed), thresholds)

    return Case(
        name=f"draw with masks llama3 r{ROWS}",
        program=draw_masked,
        arguments=shapes(
            ((ROWS, vocab), jnp.float32), ((ROWS, len(Column)), jnp.int32), ((ROWS, words(vocab)), jnp.int32)
        ),
        most_moved=MASKED * 4 * ROWS * vocab,
    )


def _fully(vocab: int) -> Case:
    """Build the case of sampling with penalties, bias, bans and log-probabilities."""

    def draw_fully(logits: jax.Array, packed: jax.Array, counts: jax.Array, *adjust: jax.Array) -> Any:
        return draw_full(
            logits,
            SamplingRows(packed),
            Adjust(*adjust),
            counts,
            MosaicThresholds(ThresholdSpec(vocab, platform="gpu")),
        )

    return Case(
        name=f"draw fully llama3 r{ROWS}",
        program=draw_fully,
        arguments=shapes(
            ((ROWS, vocab), jnp.float32),
            ((ROWS, len(Column)), jnp.int32),
            ((ROWS, vocab), jnp.int16),
            ((ROWS, ADJUSTED), jnp.int32),
            ((ROWS, ADJUSTED), jnp.float32),
            ((), jnp.int32),
        ),
        usual=False,
        held=1 << 30,  # the counts: copied here, but donated in an engine
        most_moved=FULLY * 4 * ROWS * vocab,
    )


def served_steps(served: Served) -> Iterator[Step]:
    named = f"{served.model} tp{served.tp}" + (f" draft{served.draft}" if served.draft else "")
    named += f" {served.layers} layers" if served.layers else ""
    named += f" {served.quantization}" if served.quantization else ""
    named += " gated" if served.gated else ""
    config = partial(config_of, served)
    named += " graphed" if served.graphed else ""
    named += " cascade" if served.cascade else ""
    wanted = served.wanted or (DRAFTING if served.draft else PLAIN)
    layers = served.layers or published_spec(served.model).layers
    flags = (COLLECTIVES,) if served.graphed else ()
    for step in steps(named, config, served.tp, served.usual, wanted, flags, layers):
        yield replace(step, least_memory=served.memory)
    if served.segments:
        for part in Part:
            kind = f"segment {part.value}"
            boundary = "layer" if part is Part.WHOLE else "op"
            yield Step(
                f"{named} {kind}",
                partial(_program, partial(config_of, served, boundary=boundary), partial(_segment, part=part)),
                devices=served.tp,
                needs=frozenset() if part is Part.FEED else frozenset({"tma", "wgmma"}),
                usual=kind in served.usual,
                layers=1,
            )


def config_of(served: Served, backend: str, boundary: str = "chunk") -> ExecutorConfig:
    spec = published_spec(served.model)
    if served.quantization is not None:
        spec = spec.quantized_as(served.quantization)
    if served.layers is not None:
        spec = spec.first_layers(served.layers)
    return ExecutorConfig(
        spec,
        random_init(),
        plan_mesh(f"1x{served.tp}"),
        served.rows,
        TOKENS,
        min(LENGTH, spec.max_positions),
        page_size=PAGE,
        attention_backend=backend,
        cascade_attention="on" if served.cascade else "off",
        preempt_boundary=boundary,
        speculative=Speculative("ngram", served.draft) if served.draft else None,
        experts_backend=EXPERTS[backend],
        sampling_backend="xla" if spec.vocab % 4 else EXPERTS[backend],  # as `auto` does for such rows
        products_backend=EXPERTS[backend] if served.quantization == "fp8_per_block" else "auto",
        mlp_backend=EXPERTS[backend] if served.gated else "auto",
    )


class Kind(NamedTuple):
    """A kind of step."""

    program: Callable[[DeviceState], jax.stages.Lowered]
    needs: frozenset[str] = frozenset()
    graph: bool = False  # the whole step is one CUDA graph
    layered: bool = True  # computes the layers of the model


PLAIN, DRAFTING = ("decode", "prefill", "draw"), ("verify", "judge")


def kinds() -> dict[str, Kind]:
    """Return the kinds of steps.

    The largest decode step, the largest step with prompts, and sampling; the largest step of rows
    that drafted, and their verification.
    """
    return {
        "decode": Kind(_decode, frozenset({"tma"}), graph=True),
        "prefill": Kind(_prefill, frozenset({"tma", "wgmma"})),
        "draw": Kind(_draw, graph=True, layered=False),
        "verify": Kind(_verify, frozenset({"tma"}), graph=True),
        "judge": Kind(_judge, layered=False),
    }


def steps(
    named: str,
    config: Callable[[str], ExecutorConfig],
    tp: int,
    usual: tuple[str, ...] = (),
    wanted: tuple[str, ...] = PLAIN,
    flags: tuple[str, ...] = (),
    layers: int = 0,
) -> Iterator[Step]:
    """Yield the kinds `wanted`, for the engine that `config` returns for an attention backend."""
    # Collectives over several devices stay outside of CUDA graphs, unless XLA is asked to include them.
    graphs = tp == 1 or COLLECTIVES in flags
    for name in wanted:
        kind = kinds()[name]
        yield Step(
            f"{named} {name}",
            partial(_program, config, kind.program),
            devices=tp,
            needs=kind.needs,
            usual=name in usual,
            command_buffers=1 if kind.graph and graphs else None,
            layers=layers if kind.layered else 0,
            flags=flags,
        )


def _program(
    config: Callable[[str], ExecutorConfig], program: Callable[[DeviceState], jax.stages.Lowered], mesh: Mesh
) -> jax.stages.Lowered:
    return program(described(config(BACKENDS[mesh.devices.flat[0].platform]), mesh))


class Described(DeviceState):
    """The state of an instance on devices that are not there: its arrays are abstract.

    Its programs can be compiled, and not run.
    """

    def _place(self, values: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), values)


def inputs(config: ExecutorConfig, mesh: Mesh) -> tuple[Resolved, Tree]:
    """Return what `build_executors` would resolve `config` to, with as many pages as fit, and the abstract weights."""
    tp = config.mesh.tp
    spec = replace(config.spec.for_tp(tp), kv_scales=kv.scaled(config.kv_cache_dtype))
    weights = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(mesh, info.partition(tp))),
        registry.abstract_weights(spec, DTYPE),
        is_leaf=lambda leaf: isinstance(leaf, Info),
    )
    room = kv.device_pool_bytes(
        mesh,
        utilization=config.gpu_memory_utilization,
        weights=sum(
            prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)
        ),
        temporaries=SPARE,
        sharing=1,
        memory=memory_of(mesh.devices.flat[0].device_kind),
    )
    made = resolve(config, spec, mesh, DTYPE)
    pages = kv.fit_pages(made.spec, config.page_size, made.stored, pool_bytes=room, max_model_len=config.max_model_len)
    return replace(made, limits=replace(made.limits, pages=pages)), weights


def described(config: ExecutorConfig, mesh: Mesh) -> DeviceState:
    """Return the state of an instance on a mesh of devices that are not there."""
    resolved, weights = inputs(config, mesh)
    [state] = states(resolved, [mesh], [weights], Described)
    return state


def _of(calls: Iterable[Call], label: str) -> jax.stages.Lowered:
    """Lower one of some programs."""
    return next(call.program.lower(*call.args) for call in calls if call.label == label)


def _step(state: DeviceState, wanted: Callable[[Bucket], bool]) -> jax.stages.Lowered:
    """Lower the largest step of a kind."""
    bucket = max(filter(wanted, state.programs.limits.buckets))
    return _of(step_calls(state, bucket), bucket.label)


def _decode(state: DeviceState) -> jax.stages.Lowered:
    return _step(state, lambda bucket: bucket.decode)


def _prefill(state: DeviceState) -> jax.stages.Lowered:
    return _step(state, lambda bucket: not bucket.decode)


def _verify(state: DeviceState) -> jax.stages.Lowered:
    return _step(state, lambda bucket: bucket.verify)


def _segment(state: DeviceState, part: Part) -> jax.stages.Lowered:
    """Lower a segment of the model's first layer in the largest step."""
    return _of(inner_calls(state), f"{part.value} {max(state.programs.limits.buckets).tokens}")


def _draw(state: DeviceState) -> jax.stages.Lowered:
    slots = state.programs.limits.slots
    return _of(draw_calls(state, slots), f"draw {slots}")


def _judge(state: DeviceState) -> jax.stages.Lowered:
    """Lower the verification of the largest step of rows that draft as much as they may."""
    limits = state.programs.limits
    return _of(drafting_calls(state), f"verify {limits.slots} x {limits.draft}")
