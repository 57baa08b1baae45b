"""The error for quantized checkpoints that are not read, which names what to do."""

from __future__ import annotations

from typing import NoReturn

from jaxserve.sched.api.errors import InvalidValue

READ = (
    "quant_method 'fp8' (e4m3, per tensor, channel or block), 'fbgemm_fp8', 'compressed-tensors' (int-quantized, "
    "float-quantized and pack-quantized of 4 or 8 bits), 'gptq' of 4 or 8 bits, and 'awq' of 4 bits (gemm)"
)


def refuse(method: object, what: str = "") -> NoReturn:
    """Raise InvalidValue for a `quant_method`, or a value of its config."""
    named = f"quant_method {str(method)[:60]!r}" + (f" with {what[:120]}" if what else "")
    raise InvalidValue(
        f"config.json: quantization_config of {named} is not supported; serve the model that it was quantized from "
        f"with --quantization int8 or fp8, or a checkpoint of {READ}",
        "quantization_config",
    )
