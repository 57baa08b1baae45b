"""Stage C: the engine `1x1` with an 8B model of random weights."""

from __future__ import annotations

from .part import Part

UPDATE = "--xla_gpu_command_buffer_update_mode="
MODES = {
    "default": "",
    "skip profiled": UPDATE + "SKIP_PROFILED",
    "skip temporaries": UPDATE + "SKIP_TEMP",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
    "whole products": "--xla_gpu_experimental_force_split_k=1",  # not an update mode, but compared in the same way
}
DRY = ("default", "skip profiled")
GATED = Part("engine gated products", "C", 150, "decode:update_mode", {"flags": "", "mlp": "mosaic_gpu"})


def parts(dry: bool) -> list[Part]:
    """Return the parts in the order of their importance; later ones load programs that earlier ones compiled."""
    return [
        Part("engine decode", "C", 240, "decode:measure"),
        Part("engine prefill", "C", 240, "prefill:measure"),
        Part("engine step model", "C", 240, "prefill:step_model"),
        Part("engine idle", "C", 240, "serving:idle"),
        *(
            Part(f"engine update mode, {name}", "C", 150, "decode:update_mode", {"flags": flags})
            for name, flags in MODES.items()
            if name in DRY or not dry
        ),
        *([] if dry else [GATED]),  # against the default mode; needs a GPU
    ]
