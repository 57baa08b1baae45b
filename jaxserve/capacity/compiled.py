"""Activations from compiled programs: an engine's largest programs, compiled without the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxserve.capacity.activations import COUNTS, Activations, adjusted
from jaxserve.capacity.fit import Setting
from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.startup import aot
from jaxserve.engine.startup.build import ExecutorConfig, random_init
from jaxserve.errors import InvalidValue
from jaxserve.models.spec import ModelSpec
from pallas_kernels.gate.compiling import compile_all
from pallas_kernels.gate.targets import TARGETS

LIMIT = 3600.0  # seconds per program
Progress = Callable[[int, int, str], None]


def compiled(spec: ModelSpec, setting: Setting, tp: int, progress: Progress | None = None) -> Activations:
    """Return the activations of one instance's largest step and sampling, as compiled.

    The environment must be that of `targets.prepare`. Raises InvalidValue with the compiler's message
    if a program does not compile.
    """
    outcomes: dict[str, Any] = {}
    cases = [
        case for case in aot.steps("", partial(_config, spec, setting, tp), tp) if not case.name.endswith("decode")
    ]

    def tell(case: Any, outcome: Any) -> None:
        outcomes[case.name.strip()] = outcome
        if progress is not None:
            progress(len(outcomes), len(cases), case.name.strip())

    target = TARGETS[setting.device.target or ""]
    compile_all(cases, target, jobs=os.cpu_count() or 1, tell=tell, limit=LIMIT)
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            raise InvalidValue(f"--compile: {name} of {setting.name} at tp={tp}: {outcome}", "compile")
    step, draw = (outcomes[name].memory - outcomes[name].arguments for name in ("prefill", "draw"))
    source = f"compiled with {target.compiler()}"
    draw += adjusted(spec, setting.max_num_seqs)
    return Activations(step, draw, setting.max_num_seqs * spec.vocab * COUNTS, source=source)


def _config(spec: ModelSpec, setting: Setting, tp: int, backend: str) -> ExecutorConfig:
    return ExecutorConfig(
        spec,
        random_init(),
        plan_mesh(f"1x{tp}"),
        setting.max_num_seqs,
        setting.max_num_batched_tokens,
        min(setting.max_model_len, spec.max_positions),
        dtype=str(setting.dtype),
        page_size=setting.page_size,
        kv_cache_dtype=setting.kv_cache_dtype,
        gpu_memory_utilization=setting.utilization,
        attention_backend=backend,
    )
