"""`jaxserve convert` and back: equal arrays on any mesh, and errors that name the problem."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.cli.main import dispatch
from jaxserve.errors import InvalidValue
from jaxserve.models import converted, registry
from jaxserve.models.manifest import FOLDER, NAME
from jaxserve.models.weights import WeightsError, load_weights
from tests.support.models.configs import CASES
from tests.support.models.driver import mesh, peer

pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed; pip install '.[orbax]'")


def make(folder: Path, case: str = "minimax-m2", **changes: Any) -> Path:
    """Write a small random model into `folder`."""
    family, facts = CASES[case]
    peer(family, **{**facts, **changes}).save_pretrained(folder)  # type: ignore[operator]
    return folder


def convert(source: Path, out: Path, *flags: str) -> int:
    return dispatch("convert", ["--model", str(source), "--out", str(out), *flags])


def same(found: Any, want: Any) -> None:
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, want)), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding, path
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), str(path))


@pytest.mark.parametrize(
    ("case", "name"), [("minimax-m2", None), ("gpt-oss", "int8"), ("deepseek-v2, groups, a latent of queries", "fp8")]
)
def test_restored_weights_equal_loaded_ones(tmp_path: Path, case: str, name: str | None) -> None:
    source, out = make(tmp_path / "a", case, vocab_size=97), tmp_path / "b"
    assert convert(source, out, *([] if name is None else ["--quantization", name])) == 0
    want = registry.load_spec(source).quantized_as(name)
    assert registry.load_spec(out) == want and registry.load_spec(out).quantized_as(name) == want
    for tp in (1, 2):
        where = [mesh(tp)]
        for dtype, transposed in (("float32", True), ("bfloat16", False)):
            spec = replace(want.for_tp(tp), transposed=transposed)
            same(converted.load(out, spec, dtype, where), load_weights(source, spec, dtype, where))


def test_progress_counts_parts_and_cache_scales_are_converted(tmp_path: Path) -> None:
    source, out, seen = make(tmp_path / "a", "llama3, biases"), tmp_path / "b", []
    spec = registry.load_spec(source)
    converted.save(source, out, spec, "float32", progress=lambda *at: seen.append(at))
    assert seen == [(i, 5) for i in range(1, 6)]  # embedding, norm, head, two layers
    spec = replace(spec, kv_scales=True)
    same(converted.load(out, spec, "float32", [mesh(2)]), load_weights(source, spec, "float32", [mesh(2)]))


def test_replicated_kv_heads_need_their_own_conversion(tmp_path: Path) -> None:
    source, out = make(tmp_path / "a", "llama3, biases"), tmp_path / "b"  # two KV heads
    assert convert(source, out) == 0
    spec = registry.load_spec(out).for_tp(4)
    with pytest.raises(WeightsError, match="1 copies of each kv head, this mesh needs 2: convert with --mesh 1x4"):
        converted.load(out, spec, "float32", [mesh(4)])
    assert convert(source, tmp_path / "c", "--mesh", "1x4") == 0
    where = [mesh(4)]
    same(converted.load(tmp_path / "c", spec, "float32", where), load_weights(source, spec, "float32", where))


def test_an_interrupted_conversion_is_reported_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = make(tmp_path / "a", "llama3, biases"), tmp_path / "b"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted.save(source, out, registry.load_spec(source), "float32", progress=stop)
    with pytest.raises(InvalidValue, match=r"is an unfinished conversion: .*; run `jaxserve convert` again"):
        converted.load(out, registry.load_spec(source), "float32", [mesh(1)])
    assert convert(source, out) == 0
    assert (out / NAME).is_file() and (out / "config.json").is_file()


def test_wrong_folders_and_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make(tmp_path / "a", "llama3, biases"), tmp_path / "b"
    spec = registry.load_spec(source)
    with pytest.raises(InvalidValue, match="is not an Orbax checkpoint of jaxserve: it has no"):
        converted.load(source, spec, "float32", [mesh(1)])
    assert convert(tmp_path / "nowhere", out) == 2 and "does not exist" in capsys.readouterr().err
    assert convert(source, source) == 2 and "is not empty: config.json" in capsys.readouterr().err
    assert convert(source, out) == 0
    assert convert(source, out) == 2 and "holds a finished conversion" in capsys.readouterr().err
    assert convert(out, tmp_path / "c") == 2 and "is converted already" in capsys.readouterr().err
    with pytest.raises(WeightsError) as caught:
        converted.load(out, replace(spec, layers=1, ff_dim=80, tied=True), "float32", [mesh(1)])
    for part in ("unexpected layers.1/", "unexpected head/array", "layers.0/mlp.down is float32 [64, 32], the config"):
        assert part in str(caught.value)
    with pytest.raises(WeightsError, match=r"layers\.0/mlp\.down is float32 .* the config says|missing .*mlp.down.val"):
        converted.load(out, replace(spec, quantized=None).quantized_as("int8"), "float32", [mesh(1)])
    with pytest.raises(WeightsError, match=r"holds LlamaForCausalLM, config\.json says MistralForCausalLM"):
        converted.load(out, replace(spec, architecture="MistralForCausalLM"), "float32", [mesh(1)])
    shutil.rmtree(out / FOLDER / "layers.1")
    with pytest.raises(WeightsError, match=r"weights/layers\.1 cannot be restored: .*; convert again"):
        converted.load(out, spec, "float32", [mesh(1)])
    (out / NAME).write_text(json.dumps({"format": 7}))
    with pytest.raises(InvalidValue, match="has format 7; this version reads 1: convert again"):
        registry.load_spec(out)
