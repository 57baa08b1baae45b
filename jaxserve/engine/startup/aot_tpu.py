"""Cases of the compile gate for whole steps on TPUs: what `examples/serve.ipynb` runs on a v5e-1 and on a v5e-8.

`python -m pallas_kernels.gate --target tpu:v5e` finds them by the name of this module. A step on a TPU needs none of
the instructions of a Hopper GPU, and there are no CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from jaxserve.config import ServeConfig, parse_mesh
from jaxserve.engine.memory import kv
from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.startup.aot import steps
from jaxserve.engine.startup.build import ExecutorConfig, random_init
from jaxserve.models.published import published_spec
from jaxserve.models.spec import ModelSpec
from pallas_kernels.gate.cases import Step

MODEL, LENGTH = "qwen3-0.6b", 4096
LAYERS = 4  # of a step with prompts: all 28 take ten minutes on a busy machine
# The settings of the notebook's server by machine; tests/notebooks compares them with its cell. Without --mesh, an
# instance takes all chips, here one.
NOTEBOOK = {
    "v5e-1": ServeConfig(model=MODEL, max_model_len=LENGTH, max_num_seqs=16),
    "v5e-8": ServeConfig(model=MODEL, max_model_len=LENGTH, max_num_seqs=16, mesh="4x2"),
}


def cases() -> list[Step]:
    """Return the largest decode step, and the first layers of the largest step with prompts, on each machine."""
    return [step for settings in NOTEBOOK.values() for step in served(settings)]


def served(settings: ServeConfig) -> Iterator[Step]:
    """Yield the steps of one of a server's instances, which the gate compiles with `--all`."""
    whole, mesh = published_spec(MODEL), settings.mesh or "1x1"
    few = whole.first_layers(LAYERS)
    _, tp = parse_mesh(mesh)
    named = f"notebook {MODEL} {mesh}"
    for kind, spec, note in (("decode", whole, ""), ("prefill", few, f" {LAYERS} layers")):
        config = partial(executor_config, settings, spec)
        for step in steps(named + note, config, tp, wanted=(kind,), layers=spec.layers):
            yield replace(step, needs=frozenset(), command_buffers=None, target="tpu:v5e")


def executor_config(settings: ServeConfig, spec: ModelSpec, backend: str) -> ExecutorConfig:
    """Return the settings of a server's executors on TPUs, as `assemble.build` reads them, with the kernel named."""
    length = settings.max_model_len or spec.max_positions
    return ExecutorConfig(
        spec.for_length(length),
        random_init(),
        plan_mesh(settings.mesh or "1x1"),
        settings.rows("tpu"),
        settings.step_tokens("tpu"),
        length,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        page_size=settings.block_size or kv.default_page_size("tpu"),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        attention_backend=backend,
        cascade_attention=settings.cascade_attention,
        preempt_boundary=settings.preempt_boundary,
    )
