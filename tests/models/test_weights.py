"""Loading is strict: one error names all mismatches before anything is computed."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from jaxserve.models import registry, weights
from jaxserve.models.dummy import random_weights
from jaxserve.models.layers import Info
from jaxserve.models.registry import spec_from_config
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import WeightsError, load_weights
from tests.support.models.configs import CONFIG
from tests.support.models.driver import mesh

Tensors = dict[str, npt.NDArray[Any]]


@pytest.fixture
def spec() -> ModelSpec:
    return spec_from_config(CONFIG)


@pytest.fixture
def tensors(spec: ModelSpec) -> Tensors:
    rng = np.random.default_rng(0)
    return {s.name: rng.standard_normal(s.shape, np.float32) for info in _infos(spec) for s in info.sources}


def _infos(spec: ModelSpec) -> list[Info]:
    return jax.tree.leaves(registry.abstract_weights(spec, "float32"), is_leaf=lambda x: isinstance(x, Info))


def test_a_folder_loads_and_reports_progress(tmp_path: Path, spec: ModelSpec, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    (tree,) = load_weights(tmp_path, spec, "float32", [mesh(1)], progress=lambda *at: seen.append(at))
    total = 3 + 2 * 6
    assert seen == [(i, total) for i in range(1, total + 1)]
    np.testing.assert_array_equal(tree["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(tree["layers"][1]["mlp"]["down"], tensors["model.layers.1.mlp.down_proj.weight"].T)
    qkv = np.asarray(tree["layers"][0]["attention"]["qkv"])  # [E, K, (G + 2) * D]
    prefix = "model.layers.0.self_attn."
    np.testing.assert_array_equal(qkv[:, 1, :4].T, tensors[prefix + "q_proj.weight"][4:])  # heads 2 and 3
    np.testing.assert_array_equal(qkv[:, 1, 4:6].T, tensors[prefix + "k_proj.weight"][2:])
    np.testing.assert_array_equal(qkv[:, 1, 6:].T, tensors[prefix + "v_proj.weight"][2:])


def test_several_files_with_an_index_load_like_one(tmp_path: Path, spec: ModelSpec, tensors: Tensors) -> None:
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "not-in-the-index.safetensors")
    where = {name: file for file, held in parts.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tree,) = load_weights(tmp_path, spec, "float32", [mesh(1)])
    np.testing.assert_array_equal(tree["head"], tensors["lm_head.weight"])
    (tmp_path / "b.safetensors").unlink()
    first = next(name for name in where if where[name] == "b.safetensors")
    message = (
        rf"names missing files: b\.safetensors, with {len(parts['b.safetensors'])} tensors, the first of them {first};"
    )
    with pytest.raises(WeightsError, match=message):
        load_weights(tmp_path, spec, "float32", [mesh(1)])


def test_bfloat16_is_read_and_dtypes_are_cast(tmp_path: Path, spec: ModelSpec, tensors: Tensors) -> None:
    low = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    save_file(low, tmp_path / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        (tree,) = load_weights(tmp_path, spec, dtype, [mesh(1)])
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(tree)} == {dtype}
        want = low["model.norm.weight"].astype(np.float32)
        np.testing.assert_array_equal(np.asarray(tree["norm"], np.float32), want)


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors", "model-00001-of-00001.safetensors"])
def test_files_beside_those_of_the_model_are_passed_over(
    tmp_path: Path, spec: ModelSpec, tensors: Tensors, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level("INFO")
    save_file(tensors, tmp_path / name)
    others = ["adapter_model.safetensors", "consolidated.safetensors", "optimizer.safetensors"]
    for other in others:
        save_file({"other": np.zeros(3, np.float32)}, tmp_path / other)
    (tree,) = load_weights(tmp_path, spec, "float32", [mesh(1)])
    np.testing.assert_array_equal(np.asarray(tree["norm"]), tensors["model.norm.weight"])
    (line,) = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert line.endswith(", ".join(others))


def test_weights_of_an_older_format_come_with_the_conversion(tmp_path: Path, spec: ModelSpec) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is of another format.*save_pretrained\(NEW\)"):
        load_weights(tmp_path, spec, "float32", [mesh(1)])


def test_one_error_names_every_mismatched_tensor(tmp_path: Path, spec: ModelSpec, tensors: Tensors) -> None:
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.weight"] = np.zeros((3, 2), np.float32)
    tensors["lm_head.weight"] = np.zeros((24, 9), np.float32)
    tensors["model.layers.0.input_layernorm.weight"] = np.zeros(8, np.int8)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(1, np.float32)  # not needed, and ignored
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load_weights(tmp_path, spec, "float32", [mesh(1)])
    for part in (
        "5 tensors",
        "missing model.norm.weight [8]",
        "missing model.layers.1.mlp.up_proj.weight [16, 8]",
        "unexpected model.layers.0.mlp.experts.weight [3, 2] in model.safetensors",
        "misshapen lm_head.weight: [24, 9] in model.safetensors, the config says [24, 8]",
        "model.layers.0.input_layernorm.weight is I8 in model.safetensors; supported are F32, F16, BF16",
    ):
        assert part in str(caught.value)
    assert "inv_freq" not in str(caught.value)


def test_a_tied_head_in_the_file_is_ignored(tmp_path: Path, tensors: Tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    tied = spec_from_config({**CONFIG, "tie_word_embeddings": True})
    assert "head" not in load_weights(tmp_path, tied, "float32", [mesh(1)])[0]


def test_speculative_layers_in_the_file_are_ignored(tmp_path: Path, tensors: Tensors) -> None:
    spec = replace(spec_from_config(CONFIG), guessing=1)
    save_file({**tensors, "model.layers.2.eh_proj.weight": np.zeros((8, 16), np.float32)}, tmp_path / "a.safetensors")
    assert len(load_weights(tmp_path, spec, "float32", [mesh(1)])[0]["layers"]) == 2
    with pytest.raises(WeightsError, match=r"unexpected model\.layers\.2\.eh_proj"):
        load_weights(tmp_path, replace(spec, guessing=0), "float32", [mesh(1)])


@pytest.mark.parametrize("shard", ["model.safetensors", "model-00002-of-00002.safetensors"])
@pytest.mark.parametrize("cut", [4, 60, -10])
def test_a_truncated_file_is_named(tmp_path: Path, spec: ModelSpec, tensors: Tensors, cut: int, shard: str) -> None:
    held = tensors
    if shard != "model.safetensors":  # a shard that an index names
        held = {"model.norm.weight": tensors["model.norm.weight"]}
        first = "model-00001-of-00002.safetensors"
        save_file({name: tensor for name, tensor in tensors.items() if name not in held}, tmp_path / first)
        where = {name: shard if name in held else first for name in tensors}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    save_file(held, tmp_path / shard)
    (tmp_path / shard).write_bytes((tmp_path / shard).read_bytes()[:cut])
    message = r"tensor 'model\.norm\.weight' ends at byte .* the file is truncated" if cut < 0 else "safetensors"
    with pytest.raises(WeightsError, match=rf"{re.escape(shard)} cannot be read.*{message}"):
        load_weights(tmp_path, spec, "float32", [mesh(1)])


def test_a_git_lfs_pointer_instead_of_a_file_is_reported(tmp_path: Path, spec: ModelSpec) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read .* a Git LFS pointer"):
        load_weights(tmp_path, spec, "float32", [mesh(1)])


@pytest.mark.parametrize("wrong", [{"shape": [8, 4]}, {"data_offsets": [0, 7]}, {"dtype": "F99"}])
def test_a_contradictory_header_is_refused(
    tmp_path: Path, spec: ModelSpec, tensors: Tensors, wrong: dict[str, Any]
) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["lm_head.weight"] |= wrong
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_weights(tmp_path, spec, "float32", [mesh(1)])


def test_an_unreadable_tensor_is_named_and_no_weight_stays_loaded(
    tmp_path: Path, spec: ModelSpec, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def get_tensor(self, name: str) -> Any:
            if name == "model.norm.weight":
                raise OSError(5, "Input/output error")
            return self.handle.get_tensor(name)

    def failing(path: Path, open_files: Any) -> Any:
        return {name: (file, Failing(handle)) for name, (file, handle) in index(path, open_files).items()}

    def attempt() -> tuple[str, int]:
        done = 0

        def progress(count: int, total: int) -> None:
            nonlocal done
            done = count

        try:
            load_weights(tmp_path, spec, "float32", [mesh(2)], progress=progress)
        except WeightsError as error:
            return str(error), done
        raise AssertionError("the load did not fail")

    save_file(tensors, tmp_path / "model.safetensors")
    index = weights._index
    monkeypatch.setattr(weights, "_index", failing)
    before = jax.live_arrays()  # kept alive, so that their ids are not reused
    said, done = attempt()
    gc.collect()
    assert "model.safetensors: tensor 'model.norm.weight' cannot be read: [Errno 5] Input/output error" in said
    assert 0 < done < 15  # some tensors were already on the devices
    assert {id(one) for one in jax.live_arrays()} <= {id(one) for one in before}


def test_missing_files_are_named(tmp_path: Path, spec: ModelSpec) -> None:
    with pytest.raises(WeightsError, match=r"nowhere' does not exist; expected model\.safetensors"):
        load_weights(tmp_path / "nowhere", spec, "float32", [mesh(1)])
    with pytest.raises(WeightsError, match=r"no \*\.safetensors of a model in .* expected model\.safetensors"):
        load_weights(tmp_path, spec, "float32", [mesh(1)])
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="expected a 'weight_map'"):
        load_weights(tmp_path, spec, "float32", [mesh(1)])


def test_instances_on_the_same_devices_share_one_copy(spec: ModelSpec) -> None:
    first, other, again = random_weights(spec, "float32", [mesh(1), mesh(2), mesh(1)])
    assert first["embed"] is again["embed"]
    assert first["embed"] is not other["embed"]


def test_an_indivisible_vocabulary_is_sharded(tmp_path: Path) -> None:
    spec = spec_from_config({**CONFIG, "vocab_size": 23})
    tensors = {s.name: np.ones(s.shape, np.float32) for info in _infos(spec) for s in info.sources}
    save_file(tensors, tmp_path / "model.safetensors")
    (tree,) = load_weights(tmp_path, spec.for_tp(2), "float32", [mesh(2)])
    for name in ("embed", "head"):
        assert [shard.data.shape for shard in tree[name].addressable_shards] == [(12, 8)] * 2
        assert np.asarray(tree[name]).sum() == 23 * 8
    with pytest.raises(WeightsError, match=r"0 rows of padding .* use spec\.for_tp\(2\)"):
        load_weights(tmp_path, spec, "float32", [mesh(2)])


def test_a_spec_of_another_mesh_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(WeightsError, match=r"use spec\.for_tp\(4\)"):
        random_weights(spec, "float32", [mesh(4)])


def test_weights_do_not_change_with_their_file(tmp_path: Path, spec: ModelSpec, tensors: Tensors) -> None:
    """Tensors are views of the file until they are placed on devices."""
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    (tree,) = load_weights(tmp_path, spec, "float32", [mesh(1)])
    with file.open("r+b") as stream:
        stream.seek(int.from_bytes(stream.read(8), "little") + 8)
        stream.write(b"\0" * sum(x.nbytes for x in tensors.values()))
    np.testing.assert_array_equal(tree["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(tree["norm"], tensors["model.norm.weight"])
