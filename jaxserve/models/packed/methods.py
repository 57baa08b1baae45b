"""The quantizations of checkpoints that are read, by the `quant_method` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxserve.models.json_file import object_in
from jaxserve.models.packed import awq, compressed, gptq, mxfp4
from jaxserve.models.packed.computed import Tensors
from jaxserve.models.packed.eight import Fp8
from jaxserve.models.packed.refused import refuse
from jaxserve.models.quantization import Quantization


class Method(Protocol):
    """How checkpoints of a method are read. given: the `quantization_config` of their config.json."""

    def declared(self, given: Mapping[str, Any]) -> Quantization | None:
        """Return how the engine holds weights as they are stored; None if it widens them. Raises InvalidValue."""

    def unpacked(self, tensors: Tensors, given: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
        """Return the tensors with those of the packing replaced by weights."""


METHODS: Mapping[str, Method] = {
    "awq": awq,
    "compressed-tensors": compressed,
    "fbgemm_fp8": Fp8("fbgemm_fp8"),
    "fp8": Fp8("fp8"),
    "gptq": gptq,
    "mxfp4": mxfp4,
}
# Files beside a config.json that lacks a `quantization_config`, as older tools write them, and their methods.
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def completed(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config with the `quantization_config` that the folder has in another file or under another key."""
    older = config.pop("compression_config", None)
    if config.get("quantization_config"):
        return config
    if older:
        return {**config, "quantization_config": {"quant_method": "compressed-tensors", **older}}
    for name, method in BESIDE.items():
        if (folder / name).is_file():
            return {**config, "quantization_config": {"quant_method": method, **object_in(folder / name)}}
    return config


def read(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the engine holds the weights of a config.json that are stored in 8 bits; None if it widens them.

    Raises InvalidValue for an unsupported method.
    """
    given = config.get("quantization_config")
    return _method(given).declared(given) if given else None


def given_in(folder: Path) -> Mapping[str, Any]:
    """Return the `quantization_config` of a folder; {} if it has none."""
    config = object_in(folder / "config.json") if (folder / "config.json").is_file() else {}
    given: Mapping[str, Any] = completed(config, folder).get("quantization_config") or {}
    return given


def unpacked(tensors: Tensors, given: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    """Return the tensors of a checkpoint with its packed ones replaced by weights. Raises InvalidValue.

    given: the `quantization_config`.
    """
    return _method(given).unpacked(tensors, given) if given else dict(tensors)


def _method(given: Mapping[str, Any]) -> Method:
    name = given.get("quant_method")
    if name is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        name = "bitsandbytes"
    return METHODS[name] if isinstance(name, str) and name in METHODS else refuse(name)
