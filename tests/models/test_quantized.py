"""Weights in 8 bits: equal to the same weights dequantized first, in every family, on any number of shards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxserve.errors import InvalidValue
from jaxserve.models import registry
from jaxserve.models.layers import Info
from jaxserve.models.names import renamed
from jaxserve.models.narrow import SCALE, dequantize, quantize
from jaxserve.models.packed.methods import read
from jaxserve.models.quantization import FLAG, Quantization
from jaxserve.models.quantized import Quantized
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import WeightsError, load_weights, shardings
from tests.support.examples import cases
from tests.support.models import packed
from tests.support.models.configs import CASES, FULL, TOKENS
from tests.support.models.driver import Driver, mesh, peer

MODELS = CASES | FULL
Tensors = dict[str, npt.NDArray[Any]]
ODD = (16, 24)  # a block that divides neither inputs nor shards
FP8 = Quantization("float8_e4m3fn", ODD, True, ("gate", "e_score_correction_bias", "lm_head"))


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def narrow_names(spec: ModelSpec, how: Quantization) -> set[str]:
    """Return the names of checkpoint tensors that are kept in 8 bits."""
    tree = registry.abstract_weights(replace(spec, quantized=how), "float32")
    params = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (Info, Quantized)))
    return {source.name for param in params if is_quantized(param) for source in param.values.sources}


def rounded(tensors: Tensors, names: set[str], how: Quantization) -> Tensors:
    """Return a float checkpoint with the dequantized weights."""
    out = dict(tensors)
    for name in names:
        block = how.block or (1, tensors[name].shape[1])
        out[name] = dequantize(*quantize(tensors[name], how), block)
    return out


def logits(folder: Path, spec: ModelSpec, tp: int) -> npt.NDArray[np.float32]:
    held, where = spec.for_tp(tp), mesh(tp)
    driver = Driver(held, load_weights(folder, held, "float32", [where])[0], where)
    return driver.feed(TOKENS[:16])


def save(folder: Path, family: str, changes: dict[str, Any]) -> Tensors:
    """Write a small random model as one file; returns its tensors."""
    peer(family, **changes).save_pretrained(folder)  # type: ignore[operator]
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def parts_of(folder: Path, spec: ModelSpec) -> Tensors:
    """Return a checkpoint's tensors by the names of `spec`: some families store several weights in one tensor."""
    infos = jax.tree.leaves(registry.abstract_weights(spec, "float32"), is_leaf=lambda x: isinstance(x, Info))
    wanted = {source.name: source.shape for info in infos for source in info.sources}
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "np") as held:
        found = renamed(dict.fromkeys(held.keys(), (file, held)), wanted)
        return {name: np.array(part.get_tensor(name)) for name, (_, part) in found.items()}


SAMPLE = [
    ("qwen2 tied, yarn", "int8", (2,)),
    ("qwen3-moe", "fp8", (4,)),
    ("opt", "fp8_per_block", (1,)),
    ("phi3", "fp8_per_block", (2,)),
]
TPS = (1, 2, 4)
# Experts of gpt-oss lie [in, out] in one tensor and are never kept in 8 bits. Each flag meets each number of shards.
EVERY = [
    (case, name, (TPS[(at + flag) % len(TPS)],))
    for at, case in enumerate(case for case in MODELS if not case.startswith("gpt-oss"))
    for flag, name in enumerate(FLAG)
]


@pytest.mark.parametrize(("case", "name", "tps"), cases(SAMPLE, EVERY, apart=True))
def test_the_flag_computes_with_the_rounded_weights(tmp_path: Path, case: str, name: str, tps: tuple[int, ...]) -> None:
    save(tmp_path, *MODELS[case])
    spec, how = registry.load_spec(tmp_path), FLAG[name]
    tensors = parts_of(tmp_path, spec)
    names = narrow_names(spec, how)
    assert names, "no weight is quantized"
    mine = {tp: logits(tmp_path, spec.quantized_as(name), tp) for tp in tps}
    (file,) = tmp_path.glob("*.safetensors")
    save_file(rounded(tensors, names, how), file)
    for tp, found in mine.items():
        np.testing.assert_allclose(found, logits(tmp_path, spec, tp), atol=2e-4, rtol=0, err_msg=f"{tp=}")


# Checkpoints


def as_fp8(folder: Path, tensors: Tensors, how: Quantization) -> Tensors:
    """Rewrite the folder's model as an FP8 checkpoint; returns its dequantized tensors."""
    assert how.block is not None
    linear = {name for name, x in tensors.items() if x.ndim == 2 and how.takes(name) and "embed" not in name}
    held: Tensors = {}
    for name, x in tensors.items():
        if name not in linear:
            held[name] = x.astype(ml_dtypes.bfloat16)
            continue
        held[name], scales = quantize(x, how)
        held[name + SCALE] = scales
    (file,) = folder.glob("*.safetensors")
    packed.save(held, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
        "weight_block_size": list(how.block), "modules_to_not_convert": list(how.kept),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    plain = {n: x.astype(np.float32) for n, x in held.items() if not n.endswith(SCALE) and n not in linear}
    return plain | {name: dequantize(held[name], held[name + SCALE], how.block) for name in linear}


FP8_SAMPLE = [
    ("minimax-m2", ODD, (4,)),
    ("minimax-m2", (128, 128), (2,)),  # one block each
    ("minimax-m2", (4, 8), (2,)),  # of 32 inputs: as many blocks as outputs, as in DeepSeek-V3's o_proj
    ("deepseek-v3", ODD, (2,)),
]
FP8_EVERY = [
    ("deepseek-v2-lite", ODD, (1, 4)),
    ("qwen3, own head_dim", ODD, (1, 2, 4)),
]


@pytest.mark.parametrize(("case", "block", "tps"), cases(FP8_SAMPLE, FP8_EVERY, apart=True))
def test_an_fp8_checkpoint_loads_unchanged(
    tmp_path: Path, case: str, block: tuple[int, int], tps: tuple[int, ...]
) -> None:
    how = replace(FP8, block=block)
    plain = as_fp8(tmp_path, save(tmp_path, *MODELS[case]), how)
    spec = registry.load_spec(tmp_path)
    assert spec.quantized == how
    mine = {tp: logits(tmp_path, spec, tp) for tp in tps}
    (tree,) = load_weights(tmp_path, spec.for_tp(2), "bfloat16", [mesh(2)])
    kept = [x for x in jax.tree.leaves(tree["layers"], is_leaf=is_quantized) if is_quantized(x)]
    assert {(str(x.values.dtype), str(x.scale.dtype)) for x in kept} == {("float8_e4m3fn", "float32")}
    assert sum(x.values.size for x in kept) > 0.5 * sum(x.size for x in jax.tree.leaves(tree["layers"]))
    (file,) = tmp_path.glob("*.safetensors")
    save_file(plain, file)
    for tp, found in mine.items():
        want = logits(tmp_path, replace(spec, quantized=None), tp)
        np.testing.assert_allclose(found, want, atol=2e-5, rtol=0, err_msg=f"{tp=}")


def test_missing_tensors_and_wrong_dtypes_are_named(tmp_path: Path) -> None:
    tensors = save(tmp_path, *MODELS["minimax-m2"])
    as_fp8(tmp_path, tensors, FP8)
    (file,) = tmp_path.glob("*.safetensors")
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save_torch

    held = load(file)
    experts = "model.layers.0.block_sparse_moe.experts."
    del held[f"{experts}0.w1.weight{SCALE}"]
    held[f"{experts}1.w2.weight"] = held[f"{experts}1.w2.weight"].float()
    held[f"{experts}2.w3.weight{SCALE}"] = held[f"{experts}2.w3.weight{SCALE}"][:1].contiguous()
    save_torch(held, file)
    spec = registry.load_spec(tmp_path)
    with pytest.raises(WeightsError) as caught:
        load_weights(tmp_path, spec, "float32", [mesh(1)])
    for part in (
        "3 tensors",
        f"missing {experts}0.w1.weight{SCALE} [4, 2]",
        f"{experts}1.w2.weight is F32 in model.safetensors; config.json's quantization_config says it is 8-bit",
        f"misshapen {experts}2.w3.weight{SCALE}: [1, 2] in model.safetensors, the config says [4, 2]",
    ):
        assert part in str(caught.value)


# Single functions


@given(
    st.integers(1, 70), st.integers(1, 70), st.sampled_from([None, (128, 128), ODD, (1, 7)]),
    st.sampled_from(["int8", "float8_e4m3fn"]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_weight_is_rounded_to_nearest(
    outputs: int, inputs: int, block: tuple[int, int] | None, dtype: str, seed: int
) -> None:
    how = Quantization(dtype, block)
    x = np.random.default_rng(seed).standard_normal((outputs, inputs), np.float32)
    x[:, : seed % 2] = 0.0
    values, scales = quantize(x, how)
    assert values.dtype == dtype and values.shape == x.shape and scales.shape == how.scales((outputs, inputs))
    back = dequantize(values, scales, block or (1, inputs))
    scale = dequantize(np.ones_like(x), scales, block or (1, inputs))
    most = scale / 2 if dtype == "int8" else np.maximum(np.abs(x) / 16, scale * 2.0**-10)
    assert (np.abs(back - x) <= most * 1.0001).all()


def test_scales_are_sharded_with_the_inputs_if_blocks_divide_them(tmp_path: Path) -> None:
    save(tmp_path, *MODELS["llama3, biases"])
    spec = replace(registry.load_spec(tmp_path), quantized=Quantization("float8_e4m3fn", (16, 16)))
    down = shardings(spec, mesh(2))["layers"][0]["mlp"]["down"]  # 64 inputs over 2 shards, 4 scales
    assert tuple(down.values.spec) == tuple(down.scale.spec) == ("tp", None)
    whole = shardings(replace(spec, quantized=FLAG["int8"]), mesh(2))["layers"][0]["mlp"]["down"]
    assert tuple(whole.values.spec) == ("tp", None) and tuple(whole.scale.spec) == (None, None)


@pytest.mark.parametrize(
    "given_config",
    [{"quant_method": "fp8", "weight_block_size": [128]}, {"quant_method": "fp8", "weight_block_size": [128, 0]},
     {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}],
)  # fmt: skip
def test_other_formats_are_refused_by_name(given_config: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"quant_method 'fp8' with .* is not supported; serve the model that"):
        read({"quantization_config": given_config})


def test_a_flag_that_contradicts_the_checkpoint_is_refused() -> None:
    spec = replace(registry.spec_from_config(MINIMAX), quantized=FP8)
    assert spec.quantized_as("fp8").quantized == FP8
    with pytest.raises(InvalidValue, match="'int8': the checkpoint is already quantized to float8_e4m3fn"):
        spec.quantized_as("int8")


MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"], "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "num_local_experts": 2,
    "num_experts_per_tok": 1, "head_dim": 8,
}  # fmt: skip
