"""Quantized checkpoints of others: read as the tools that write them read them, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxserve.cli.main import dispatch
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
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
W4 = packed.compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=16)
W8 = packed.compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
FP8 = packed.compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
FP8_WHOLE = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "re:.*gate$"]}
Pack = Callable[[packed.Array], packed.Tensors]


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


W4_ASYMMETRIC = packed.compressed(
    "pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=16
)
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}


def _more(pack: Pack, **more: Callable[[packed.Tensors], packed.Array]) -> Pack:
    """Return a packing with further or other tensors."""

    def packs(weight: packed.Array) -> packed.Tensors:
        parts = pack(weight)
        return parts | {end: make(parts) for end, make in more.items()}

    return packs


def _unpacked_zeros(parts: packed.Tensors) -> packed.Array:
    """Return the zeros in int8, as the first versions of compressed-tensors write them."""
    words = np.ascontiguousarray(parts["weight_zero_point"].T)
    nibbles = np.stack([words.view(np.uint8) & 15, words.view(np.uint8) >> 4], -1).reshape(len(words), -1)
    return (nibbles.T.astype(np.int16) - 8).astype(np.int8)


ASYMMETRIC = partial(packed.pack_quantized, symmetric=False)
BY_HAND: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": (partial(packed.gptq, symmetric=False), GPTQ),
    "gptq_v2": (partial(packed.gptq, symmetric=False, less=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq_v2, 8 bits in an order": (
        partial(packed.gptq, bits=8, order=True, less=0), {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
    ),
    "act-order": (partial(packed.pack_quantized, order=True), W4),
    "act-order and zeros": (partial(packed.pack_quantized, symmetric=False, order=True), W4_ASYMMETRIC),
    "no act-order": (
        _more(packed.pack_quantized, weight_g_idx=lambda parts: np.full(parts[""].shape[1], -1, np.int32)), W4,
    ),
    "packed zeros": (ASYMMETRIC, W4_ASYMMETRIC),
    "zeros that are not packed": (_more(ASYMMETRIC, weight_zero_point=_unpacked_zeros), W4_ASYMMETRIC),
    "zeros of a symmetric weight": (
        _more(packed.float_quantized, weight_zero_point=lambda parts: np.zeros(parts["weight_scale"].shape, np.int8)),
        FP8,
    ),
    "fbgemm": (packed.float_quantized, FBGEMM),
    "fbgemm, a bound of activations": (
        _more(packed.float_quantized, input_scale_ub=lambda parts: np.full(1, 1200, np.float32)), FBGEMM,
    ),
}  # fmt: skip


def _read(folder: Path, tensors: packed.Tensors, config: dict[str, Any]) -> packed.Array:
    """Return a module's weight as it is read from its tensors, by the ends of their names."""
    file = folder / "model.safetensors"
    packed.save({f"l.{end}": tensor for end, tensor in tensors.items()}, file)
    how = methods.read({"quantization_config": config})
    with TensorFile(file) as opened:
        read = methods.unpacked(dict.fromkeys(list(opened.keys()), (file, opened)), config)
        weight = np.array(read["l.weight"][1].get_tensor("l.weight"))
        if how is not None:
            scales = read["l.weight" + SCALE][1].get_tensor("l.weight" + SCALE)
            weight = dequantize(weight, scales, how.block or (1, weight.shape[1]))
        assert set(read) == {"l.weight"} | ({"l.weight" + SCALE} if how else set())
    return weight


@pytest.mark.parametrize("form", BY_HAND)
def test_a_weight_packed_by_hand_is_read_as_its_format_says(tmp_path: Path, form: str) -> None:
    pack, config = BY_HAND[form]
    tensors = pack(np.random.default_rng(2).normal(size=(32, 64)).astype(np.float32))
    want = tensors.pop("")
    np.testing.assert_array_equal(_read(tmp_path, tensors, config).astype(np.float32), want.astype(np.float32))


Z8 = partial(packed.pack_quantized, bits=8, size=-1)


@pytest.mark.parametrize(
    ("pack", "config", "end", "change", "error"),
    [
        (packed.float_quantized, FP8, "weight_zero_point", lambda _: np.ones((32, 1), np.int8), "says it is symmetric"),
        (Z8, W8, "weight_zero_point", lambda _: np.ones((8, 1), np.int32), "says it is symmetric"),
        (ASYMMETRIC, W4_ASYMMETRIC, "weight_zero_point", lambda x: x[1:], "zero points"),
        (ASYMMETRIC, W4_ASYMMETRIC, "weight_zero_point", lambda x: x[:, 1:], "zero points"),
        (ASYMMETRIC, W4_ASYMMETRIC, "weight_zero_point", lambda x: x.reshape(-1), "zero points"),
        (packed.pack_quantized, W4, "weight_g_idx", lambda _: np.zeros(63, np.int32), "its g_idx must name"),
        (packed.pack_quantized, W4, "weight_g_idx", lambda _: np.zeros((64, 1), np.int32), "its g_idx must name"),
        (packed.pack_quantized, W4, "weight_g_idx", lambda _: np.full(64, 4, np.int32), "its g_idx must name"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, pack: Pack, config: dict[str, Any], end: str, change: Callable[[Any], Any], error: str
) -> None:
    tensors = pack(np.random.default_rng(2).normal(size=(32, 64)).astype(np.float32))
    tensors[end] = change(tensors.get(end))
    del tensors[""]
    with pytest.raises(ValueError, match=error):
        _read(tmp_path, tensors, config)


# Models

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


LEFT = ["model.layers.0.mlp.down_proj"]


@pytest.mark.parametrize(
    "config",
    [
        {**FP8, "ignore": [*LEFT, "re:.*layers.1.self_attn.*"]},
        {**FP8, "ignore": [*LEFT, "re:model.layers.1.self_a|model.layers.7"]},  # matches beginnings of names
        {**FBGEMM, "modules_to_not_convert": [*LEFT, "model.layers.1.self_attn"]},
        {**FP8_WHOLE, "ignored_layers": [*LEFT, *(f"model.layers.1.self_attn.{name}_proj" for name in "qkvo")]},
    ],
)
def test_modules_that_are_left_wide_are_read_as_they_are(tmp_path: Path, config: dict[str, Any]) -> None:
    save(tmp_path, "qwen2 tied, yarn")
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
        ("quant_config.json", {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}),
        ("compression_config", {key: W4[key] for key in W4 if key != "quant_method"}),
    ],
)
def test_a_config_is_found_where_older_tools_put_it(tmp_path: Path, beside: str, config: dict[str, Any]) -> None:
    packs: dict[str, Pack] = {"quantize_config.json": packed.gptq, "quant_config.json": packed.awq}
    save(tmp_path, "qwen2 tied, yarn")
    wide = packed.write(tmp_path, packs.get(beside, packed.pack_quantized), {})
    whole = json.loads((tmp_path / "config.json").read_text())
    del whole["quantization_config"]
    if beside.endswith(".json"):
        (tmp_path / beside).write_text(json.dumps(config))
    else:
        whole[beside] = config
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = load_weights(tmp_path, registry.load_spec(tmp_path), "float32", [mesh(1)])[0]
    down = wide["model.layers.0.mlp.down_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found["layers"][0]["mlp"]["down"]), down.T)


def test_a_scheme_of_the_cache_is_said_to_be_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    save(tmp_path, "qwen2 tied, yarn")
    packed.write(tmp_path, packed.pack_quantized, {**W4, "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    load_weights(tmp_path, registry.load_spec(tmp_path), "float32", [mesh(1)])
    assert [text for text in caplog.messages if "kv_cache_scheme is not used" in text and "--kv-cache-dtype" in text]


@pytest.mark.parametrize(("pack", "config"), [(packed.gptq, GPTQ), (Z8, W8), (packed.float_quantized, FBGEMM)])
def test_a_packed_folder_is_converted(tmp_path: Path, pack: Pack, config: dict[str, Any]) -> None:
    pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed; pip install '.[orbax]'")
    from jaxserve.models import converted

    source, out = tmp_path / "a", tmp_path / "b"
    save(source, "qwen2 tied, yarn")
    packed.write(source, pack, config)
    assert dispatch("convert", ["--model", str(source), "--out", str(out)]) == 0
    spec = registry.load_spec(out)
    assert spec == registry.load_spec(source)
    trees = converted.load(out, spec, "float32", [mesh(1)]), load_weights(source, spec, "float32", [mesh(1)])
    for found, want in zip(*map(jax.tree.leaves, trees), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(want, np.float32))


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
        ({**FP8, "ignore": ["re:((("]}, "the module 're:\\(\\(\\('"),
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
    ("form", "end", "change", "error"),
    [
        ("gptq", "g_idx", lambda x: x + 1, "its g_idx must name a group of 2 for each of 32 inputs"),
        ("gptq", "g_idx", lambda x: x[1:], "its g_idx must name a group of 2 for each of 32 inputs"),
        ("gptq", "scales", lambda x: x[1:], "missing GATE.weight"),
        ("gptq", "qzeros", lambda x: x.reshape(-1), "missing GATE.weight"),
        ("gptq", "qweight", lambda x: x[1:], r"misshapen GATE.weight: \[64, 24\]"),
        ("gptq", "scales", None, "missing GATE.weight"),
        ("awq", "qzeros", lambda x: x[:, 1:], "missing GATE.weight"),
        ("awq", "scales", lambda x: x[:1], "missing GATE.weight"),
        ("awq", "qweight", lambda x: x[3:], "tensor 'GATE.weight' cannot be read: 29 inputs have 2 groups|misshapen"),
        ("awq", "qzeros", None, "missing GATE.weight"),
        ("w4", "weight_scale", lambda x: np.repeat(x, 3, 1)[:, :5], "missing GATE.weight"),  # groups must be alike
        ("w4", "weight_scale", lambda x: x[1:], "missing GATE.weight"),
        ("w4", "weight_scale", lambda x: x[:, :0], "missing GATE.weight"),
        ("w4", "weight_shape", lambda x: x * 2, "missing GATE.weight"),
        ("w4", "weight_shape", lambda x: x - (1 << 62), "missing GATE.weight"),
        ("w4", "weight_shape", None, "missing GATE.weight"),
        ("w4", "weight_packed", lambda x: x[:, 1:], "missing GATE.weight"),
        (
            "w4",
            "weight_zero_point",
            lambda x: np.zeros((3, 2), np.int32),
            "tensor 'GATE.weight' cannot be read: its zero",
        ),
        ("fp8", "weight_scale", None, "missing GATE.weight_scale_inv"),
        ("fp8", "weight_scale", lambda x: x[1:], "misshapen GATE.weight_scale_inv"),
        ("fp8", "weight", lambda x: x[:, 1:], "misshapen GATE.weight"),
        ("fp8", "weight", lambda x: x.astype(np.float32), "it is 8-bit"),
    ],
)
def test_damaged_tensors_are_named(
    tmp_path: Path, form: str, end: str, change: Callable[[Any], Any] | None, error: str
) -> None:
    forms: dict[str, tuple[Pack, dict[str, Any]]] = {
        "gptq": (packed.gptq, GPTQ), "awq": (packed.awq, AWQ), "w4": (packed.pack_quantized, W4),
        "fp8": (packed.float_quantized, FP8),
    }  # fmt: skip
    save(tmp_path, "qwen2 tied, yarn")
    packed.write(tmp_path, *forms[form])
    (file,) = tmp_path.glob("*.safetensors")
    held = _stored(file)
    name = f"model.layers.0.mlp.gate_proj.{end}"
    given = held.pop(name, None)
    if change is not None:
        held[name] = np.ascontiguousarray(change(given))
    packed.save(held, file)
    error = error.replace("GATE", r"model\.layers\.0\.mlp\.gate_proj")
    with pytest.raises(WeightsError, match=error):
        logits(tmp_path, 1)


def test_a_truncated_packed_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, "qwen2 tied, yarn")
    packed.write(tmp_path, packed.gptq, GPTQ)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(
        WeightsError,
        match=r"model\.safetensors cannot be read .*v_proj\.scales.* ends at byte .*: the file is truncated",
    ):
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
