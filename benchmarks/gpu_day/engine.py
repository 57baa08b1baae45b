"""The engine of stages C and D: an 8B model of random weights, its executors, and the programs compiled first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engine_bench.folders import without_weights
from benchmarks.engine_bench.steps import built, default_page, positions
from jaxserve.engine.memory import kv
from jaxserve.engine.programs.inputs import Bucket, InputBuilder, SlotTable
from jaxserve.engine.programs.mesh import plan_mesh, sub_meshes
from jaxserve.engine.runtime.device_state import DeviceState
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup.build import ExecutorConfig, LoadWeights, random_init
from jaxserve.engine.startup.warmup import idle_batch
from jaxserve.models import registry
from jaxserve.models.published import published_spec
from jaxserve.models.spec import ModelSpec

from . import floors
from .environment import cache
from .part import Run

MODEL = "llama3-8b"
RESERVED = 6 << 30  # bytes beside weights and pool: temporaries of the largest step, programs, their autotuning
SMALL = 64 << 20  # bytes of a pool in a dry run
TINY = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
THREADS = 8


def name_of(run: Run) -> str:
    """Return the model that `--model` takes, to be served with random weights; a folder in a dry run."""
    return str(tiny(run)) if run.dry else MODEL


def tiny(run: Run) -> Path:
    """Return the folder of the model of a dry run: two layers without weights, and the demo model's tokenizer."""
    return without_weights(run.folder / "tiny", {**TINY, "num_key_value_heads": 1})


def spec_of(run: Run) -> ModelSpec:
    return registry.load_spec(tiny(run)) if run.dry else published_spec(MODEL)


def config_of(
    run: Run, *, rows: int, tokens: int, length: int, pool: int | None = None, load: LoadWeights | None = None,
    mesh: str = "1x1", folder: Path | None = None, **more: Any,
) -> ExecutorConfig:  # fmt: skip
    """Return the configuration of executors that compile a program at its first use.

    rows, tokens, length: limits of a step and of a request. pool: bytes of all KV pools together; None: what the
    device has left. folder: of compiled programs; None: the one that all parts share.
    """
    plan = plan_mesh(mesh)
    sub_meshes(plan, share_devices=True)  # before jax starts, so that devices can be emulated
    page = default_page()
    spec = positions(spec_of(run), length + page)
    return ExecutorConfig(
        spec=spec, load=load or random_init(), mesh=plan, max_num_seqs=rows, max_num_batched_tokens=tokens,
        max_model_len=-(-length // page) * page, page_size=page, kv_cache_memory=pool or free_pool(spec),
        cache_folder=folder or cache(run), warm=False, **more,
    )  # fmt: skip


def executor_of(run: Run, **sizes: Any) -> JaxExecutor:
    """Build the executor of `config_of`."""
    return built(config_of(run, **sizes))


def free_pool(spec: ModelSpec) -> int:
    """Return the bytes that the device has left for a KV pool beside the weights of `spec` and RESERVED."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return SMALL
    memory = int((device.memory_stats() or {})["bytes_limit"])
    return memory - floors.weight_bytes(spec, "bfloat16") - RESERVED


def pool_of(run: Run, tokens: int) -> int:
    """Return the bytes of a KV pool for `tokens` tokens in bfloat16; SMALL in a dry run."""
    page = default_page()
    return SMALL if run.dry else -(-tokens // page) * kv.page_bytes(spec_of(run), page, "bfloat16")


def buckets(executor: JaxExecutor, rows: Iterable[int] = (), tokens: Iterable[int] = ()) -> list[Bucket]:
    """Return the programs of decode steps of `rows` rows, and of prompt chunks of `tokens` tokens."""
    builder = InputBuilder(executor.state.programs.limits)
    steps = [(count, count) for count in rows] + [(1, count) for count in tokens if count > 1]
    return list(dict.fromkeys(builder.bucket(*step) for step in steps))


def compile_first(run: Run, state: DeviceState, wanted: Sequence[Bucket]) -> None:
    """Compile step programs and the sampling after them side by side; the first calls load them from the cache."""
    limits, slots = state.programs.limits, SlotTable(state.programs.limits)
    dtype = state.weights["embed"].dtype

    def step(bucket: Bucket) -> tuple[str, Any]:
        packed = idle_batch(bucket, slots, full=False).packed
        program = state.programs.step[bucket]
        return bucket.label, program.lower(state.weights, state.pools, state.carry.tokens, packed)

    def draw(width: int) -> tuple[str, Any]:
        hidden = state.replicated((width, state.programs.spec.dim), dtype)
        sampling = slots.columns[np.full(width, limits.slots)]
        return f"draw {width}", state.programs.draw.lower(state.weights, hidden, state.carry, sampling)

    def made(work: tuple[Any, Any]) -> None:
        began = time.perf_counter()
        label, lowered = work[0](work[1])
        traced = time.perf_counter()
        lowered.compile()
        run.row(
            "compile", part=run.part.name, program=label, trace_s=round(traced - began, 2),
            compile_s=round(time.perf_counter() - traced, 2),
        )  # fmt: skip

    todo = [*((step, bucket) for bucket in wanted), *((draw, width) for width in {one.width for one in wanted})]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(made, todo):
            pass
