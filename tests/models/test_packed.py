"""Quantized checkpoints of others: read as the tools that write them read them, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxserve.errors import InvalidValue
from jaxserve.models import registry
from jaxserve.models.hub import resolve_model
from jaxserve.models.narrow import SCALE, dequantize
from jaxserve.models.packed import methods
from jaxserve.models.tensor_file import TensorFile
from jaxserve.models.weights import WeightsError, load_weights
from tests.support.models import packed
from tests.support.models.configs import CASES, FULL, TOKENS
from tests.support.models.driver import Driver, mesh, peer

TOOLS = Path(__file__).parent / "packed_by_tools.safetensors"  # a linear layer in each form, by public tools
with safe_open(TOOLS, framework="numpy") as tools:
    FORMS = {name: json.loads(told) for name, told in sorted(tools.metadata().items())}
MODELS = CASES | FULL


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_what_the_tool_that_packed_it_reads(form: str) -> None:
    config = FORMS[form]["config"]
    with TensorFile(TOOLS) as file:
        tensors = {name: (TOOLS, file) for name in list(file.keys()) if name.startswith(f"{form}/l.")}
        read = methods.unpacked(tensors, config)
        want = np.array(file.get_tensor(f"{form}/want"))
        name = f"{form}/l.weight"
        found = read[name][1].get_tensor(name)
        assert read[name][1].get_slice(name).get_shape() == list(want.shape)
        how = methods.read({"quantization_config": config})
        if how is None:
            assert set(read) == {name} and found.dtype == want.dtype
        else:  # held as it is stored
            assert set(read) == {name, name + SCALE} and found.dtype == how.dtype
            scales = read[name + SCALE][1].get_tensor(name + SCALE)
            assert scales.shape == how.scales(want.shape)
            found = dequantize(found, scales, how.block or (1, want.shape[1])).astype(want.dtype)
    np.testing.assert_array_equal(found.astype(np.float32), want.astype(np.float32))


def test_the_forms_are_those_of_three_tools() -> None:
    assert {told["tool"].split()[0] for told in FORMS.values()} == {"auto-gptq", "autoawq", "compressed-tensors"}


# Models

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
W4 = packed.compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=16)
W8 = packed.compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
FP8 = packed.compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
FP8_WHOLE = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "re:.*gate$"]}
Pack = Callable[[packed.Array], packed.Tensors]
WRITTEN: list[tuple[str, Pack, dict[str, Any], int]] = [
    ("phi3", packed.gptq, GPTQ, 2),
    (
        "qwen2 tied, yarn",
        partial(packed.gptq, symmetric=False, order=True),
        {**GPTQ, "sym": False, "desc_act": True},
        1,
    ),
    ("qwen3-moe", packed.awq, AWQ, 2),
    ("minimax-m2", packed.pack_quantized, W4, 2),
    ("qwen2 tied, yarn", partial(packed.pack_quantized, bits=8, size=-1), W8, 2),
    ("deepseek-v3", packed.float_quantized, FP8, 2),
    ("phi3", partial(packed.float_quantized, whole=True), FP8_WHOLE, 1),
]


def save(folder: Path, case: str) -> None:
    family, changes = MODELS[case]
    peer(family, **changes).save_pretrained(folder)  # type: ignore[operator]


def logits(folder: Path, tp: int, flag: str | None = None) -> npt.NDArray[np.float32]:
    spec = registry.load_spec(folder).quantized_as(flag).for_tp(tp)
    return Driver(spec, load_weights(folder, spec, "float32", [mesh(tp)])[0], mesh(tp)).feed(TOKENS[:16])


def widen(folder: Path, tensors: packed.Tensors) -> None:
    """Rewrite the folder without a quantization."""
    (file,) = folder.glob("*.safetensors")
    packed.save(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("case", "pack", "config", "tp"), WRITTEN)
def test_a_model_computes_with_its_dequantized_weights(
    tmp_path: Path, case: str, pack: Pack, config: dict[str, Any], tp: int
) -> None:
    save(tmp_path, case)
    wide = packed.write(tmp_path, pack, config)
    found = logits(tmp_path, tp)
    widen(tmp_path, wide)
    np.testing.assert_allclose(found, logits(tmp_path, tp), atol=2e-4, rtol=0)


def test_the_flag_narrows_weights_of_4_bits(tmp_path: Path) -> None:
    save(tmp_path, "qwen2 tied, yarn")
    wide = packed.write(tmp_path, packed.gptq, GPTQ)
    found = logits(tmp_path, 1, "int8")
    widen(tmp_path, wide)
    np.testing.assert_allclose(found, logits(tmp_path, 1, "int8"), atol=2e-4, rtol=0)


def test_a_flag_against_weights_of_8_bits_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "qwen2 tied, yarn")
    packed.write(tmp_path, partial(packed.pack_quantized, bits=8, size=-1), W8)
    spec = registry.load_spec(tmp_path)
    assert spec.quantized is not None and spec.quantized.dtype == "int8" and spec.quantized_as("int8") == spec
    with pytest.raises(InvalidValue, match="already quantized to int8"):
        spec.quantized_as("fp8")


def test_modules_that_are_left_wide_are_read_as_they_are(tmp_path: Path) -> None:
    save(tmp_path, "qwen2 tied, yarn")
    config = {**FP8, "ignore": ["model.layers.0.mlp.down_proj", "re:.*layers.1.self_attn.*"]}
    (file,) = tmp_path.glob("*.safetensors")
    whole = load_file(file)
    wide = packed.write(tmp_path, packed.float_quantized, config)
    held = {name: np.array(tensor) for name, tensor in _stored(file).items()}
    for name in whole:
        if "layers.0.mlp.down_proj.w" in name or ("layers.1.self_attn." in name and "weight" in name):
            held[name] = wide[name] = whole[name]
            held.pop(name + "_scale", None)
    packed.save(held, file)
    found = logits(tmp_path, 1)
    widen(tmp_path, wide)
    np.testing.assert_allclose(found, logits(tmp_path, 1), atol=2e-4, rtol=0)


def _stored(file: Path) -> packed.Tensors:
    with TensorFile(file) as opened:
        return {name: np.array(opened.get_tensor(name)) for name in list(opened.keys())}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("model.layers.0.mlp.down_proj.bias", 0.0, None),  # auto-gptq writes one for every module
        ("model.layers.0.mlp.down_proj.bias", 1.0, "unexpected model.layers.0.mlp.down_proj.bias"),
        ("model.layers.0.mlp.down_proj.input_scale", 1.0, None),
        ("model.layers.0.self_attn.k_scale", 1.0, None),
    ],
)
def test_tensors_beside_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: float, error: str | None
) -> None:
    caplog.set_level("INFO")
    save(tmp_path, "qwen2 tied, yarn")
    config, pack = (FP8, packed.float_quantized) if "scale" in name else (GPTQ, packed.gptq)
    packed.write(tmp_path, pack, config, {name: np.full(32, value, np.float16)})
    if error is None:
        assert np.isfinite(logits(tmp_path, 1)).all()
        told = "1 scales of activations, keys" if "scale" in name else "its gptq weights are widened as they are read"
        assert [record for record in caplog.records if told in record.getMessage()]
        return
    with pytest.raises(WeightsError, match=error):
        logits(tmp_path, 1)


@pytest.mark.parametrize(
    ("beside", "config"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 16, "desc_act": False, "sym": True}),
        ("quantization_config", GPTQ),
    ],
)
def test_a_config_is_found_where_older_tools_put_it(tmp_path: Path, beside: str, config: dict[str, Any]) -> None:
    save(tmp_path, "qwen2 tied, yarn")
    wide = packed.write(tmp_path, packed.gptq, GPTQ)
    if beside.endswith(".json"):
        (tmp_path / beside).write_text(json.dumps(config))
        whole = json.loads((tmp_path / "config.json").read_text())
        del whole["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(whole))
    found = load_weights(tmp_path, registry.load_spec(tmp_path), "float32", [mesh(1)])[0]
    assert wide and found["layers"][0]["mlp"]["down"].dtype == np.float32


# Refused

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip


def _compressed(**changes: Any) -> dict[str, Any]:
    return {**W4, **changes}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes' is"),
        ({"load_in_8bit": True}, "quant_method 'bitsandbytes' is"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt' is"),
        ({"quant_method": "auto-round", "bits": 4}, "quant_method 'auto-round' is"),
        ({"quant_method": ["gptq"]}, "quant_method "),
        ({**GPTQ, "bits": 3}, "'gptq' with bits=3"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'gptq' with checkpoint_format='marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "'gptq' with checkpoint_format='marlin'"),
        ({**AWQ, "version": "gemv"}, "'awq' with version='gemv'"),
        ({**AWQ, "bits": 8}, "'awq' with bits=8"),
        ({**AWQ, "zero_point": False}, "'awq' with zero_point=False"),
        (_compressed(format="marlin-24"), "'compressed-tensors' with format='marlin-24'"),
        (_compressed(format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
        (_compressed(format=None), "format=None"),
        (_compressed(config_groups={}), "no config_groups"),
        (_compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config of format 'sparse-24-bitmask'"),
        (_compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config, which rotates"),
        (packed.compressed("pack-quantized", num_bits=3, type="int"), "weights of 3 bits of type 'int'"),
        (packed.compressed("float-quantized", num_bits=4, type="float"), "weights of 4 bits of type 'float'"),
        ({**FP8, "ignore": ["re:((("]}, "the module '\\(\\(\\(.\\*'"),
        ({**FP8_WHOLE, "fmt": "e5m2"}, "'fp8' with fmt='e5m2'"),
    ],
)
def test_other_forms_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidValue, match=rf"{named}.* not supported; serve the model that it was quantized"):
        methods.read({"quantization_config": config})


@pytest.mark.parametrize(
    "config", [{**GPTQ, "group_size": "x"}, {**AWQ, "group_size": [1]}, {**W8, "ignore": 3}, ["gptq"]]
)
def test_values_of_the_wrong_kind_are_refused(config: Any) -> None:
    with pytest.raises(InvalidValue):
        registry.spec_from_config({**QWEN, "quantization_config": config})


def test_modelopt_is_refused_by_the_file_beside(tmp_path: Path) -> None:
    save(tmp_path, "qwen2 tied, yarn")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}}))
    with pytest.raises(InvalidValue, match="quant_method 'modelopt' is not supported"):
        registry.load_spec(tmp_path)


@pytest.mark.parametrize(
    ("end", "change", "error"),
    [
        ("g_idx", lambda x: x + 1, "its g_idx must name a group of 2 for each of 32 inputs"),
        ("g_idx", lambda x: x[1:], "its g_idx must name a group of 2 for each of 32 inputs"),
        ("scales", lambda x: x[1:], "missing model.layers.0.mlp.gate_proj.weight"),
        ("qzeros", lambda x: x.reshape(-1), "missing model.layers.0.mlp.gate_proj.weight"),
        ("qweight", lambda x: x[1:], r"misshapen model.layers.0.mlp.gate_proj.weight: \[64, 24\]"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, end: str, change: Callable[[Any], Any], error: str) -> None:
    save(tmp_path, "qwen2 tied, yarn")
    packed.write(tmp_path, packed.gptq, GPTQ)
    (file,) = tmp_path.glob("*.safetensors")
    held = _stored(file)
    name = f"model.layers.0.mlp.gate_proj.{end}"
    packed.save({**held, name: change(held[name])}, file)
    with pytest.raises(WeightsError, match=error):
        logits(tmp_path, 1)


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("adapter_config.json", r"is missing; it is a LoRA adapter, .* merge it with peft, `.*merge_and_unload\(\)"),
        ("model-Q4_K_M.gguf", r"Q4_K_M.gguf is a GGUF file, which is not read: .*gguf_file='model-Q4_K_M.gguf'\)"),
        (
            "pytorch_model.bin",
            r"pytorch_model.bin is of another format, which is not read: convert it with transformers",
        ),
    ],
)
def test_a_folder_of_another_kind_says_how_to_serve_it(tmp_path: Path, file: str, error: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(InvalidValue, match=error):
        registry.load_spec(tmp_path)


def test_an_adapter_beside_a_config_says_how_to_serve_it(tmp_path: Path) -> None:
    save(tmp_path, "qwen2 tied, yarn")
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(WeightsError, match="it is a LoRA adapter"):
        logits(tmp_path, 1)


def test_a_gguf_file_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match=r"model .some/model\.gguf. is a GGUF file, which is not read"):
        resolve_model("some/model.gguf")
