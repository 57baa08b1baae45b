"""The parts of the day, the most important first; docs/guide/gpu-day.md says what each answers."""

from __future__ import annotations

import os
from dataclasses import replace

from .part import Part

SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes, or torch beside jax, use one device
SLACK = 5  # of limits in a dry run: kernels are interpreted, on any CPU
ENGINE = "llguidance", "msgspec"  # modules that the engine imports and the machine lacks
FEW = {**SHARED, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}  # of a check beside others and timings
CHECKS = max(1, (os.cpu_count() or 1) - 4)  # processes that check kernels; they compile most of the time
MODES = {
    "default": "",
    "skip profiled": "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED",
    "whole products": "--xla_gpu_experimental_force_split_k=1",
}

GATED = {"flags": "", "mlp": "mosaic_gpu"}  # against the default mode; needs a GPU


def parts(dry: bool) -> list[Part]:
    """Return the parts in the order in which they run; a dry run has each, with one process that checks."""
    tests = ("pytest", "hypothesis")
    found = [
        Part("first", 150, "first:measure", restarts=True, environment=SHARED),
        *(
            Part(f"check {number}", 170, "cases:check", needs=tests, beside=True, restarts=True, environment=FEW)
            for number in range(1 if dry else CHECKS)
        ),
        Part("headlines attention", 120, "headlines:attention", beside=True, restarts=True, environment=SHARED),
        Part("headlines others", 120, "headlines:others", beside=True, restarts=True, environment=SHARED),
        Part("peers", 75, "peers:measure", restarts=True, environment=SHARED),
        Part("engine 8b", 280, "engine:measure", needs=ENGINE, restarts=True),
        Part("law Llama", 130, "cases:law", {"model": "Llama"}, needs=(*ENGINE, *tests)),
        *(
            Part(f"update mode {name}", 80, "engine:update_mode", {"flags": flags}, needs=ENGINE)
            for name, flags in MODES.items()
        ),
        *([] if dry else [Part("gated products", 80, "engine:update_mode", GATED, needs=ENGINE)]),
        Part("slopes", 60, "headlines:slopes", environment=SHARED),
        Part("headlines more", 120, "headlines:more", restarts=True, environment=SHARED),
        Part("check again", 100, "cases:again", needs=tests, restarts=True, environment=SHARED),
        *([] if dry else [Part("law DeepseekV2", 130, "cases:law", {"model": "DeepseekV2"}, needs=(*ENGINE, *tests))]),
        Part("sweep decode", 75, "sweep:tune", {"op": "decode", "queries": 1, "case": "decode B64 ctx4096"}),
        Part("sweep prefill", 75, "sweep:tune", {"op": "prefill", "queries": 1, "case": "prefill 8192"}),
        Part("memcheck", 90, "cases:memcheck", {"item": "decode: one row"}, needs=tests, environment=SHARED),
    ]
    return [replace(part, seconds=SLACK * part.seconds) for part in found] if dry else found
