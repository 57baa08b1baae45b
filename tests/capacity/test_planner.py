"""`jaxserve plan`: output and refusals, without network or device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.models import published
from jaxserve.models.hub import ModelNotFound
from tests.support.capacity.sizes import SIZES


def plan(*words: str) -> int:
    return main(["plan", *words])


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str) -> Path:
        raise ModelNotFound(f"model {name!r} is not a local folder, and downloading it from the Hub failed")

    monkeypatch.setattr(published, "fetch_config", fetch)


def test_the_table_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "meta-llama/meta-llama-3-70b", "--devices", "h200:8") == 0
    out = capsys.readouterr().out
    for part in (
        "70.55 billion parameters",
        "8x1",
        "leaves nothing for the KV cache",
        "recommended mesh 2x4: ",
        "decode 64 x 2048",
    ):
        assert part in out


def test_the_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "llama3-8b", "--devices", "h200", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    (only,) = made["meshes"]
    assert (made["fits"], made["mesh"], only["mesh"]) == (True, "1x1", "1x1")
    assert only["parameters"] == 8_030_261_248 and only["kv_bytes_per_token"] == 131_072
    assert only["steps"]["prefill 8192"]["waits_for"] == "FLOPs"
    assert only["batch"]["rows"] * 2048 <= only["kv_tokens"]
    assert made["settings"]["tpot"] == 0.05 and made["devices"]["source"]


def test_an_8_bit_cache_holds_twice_as_much(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = []
    for dtype in ("auto", "fp8"):
        assert plan("--model", "llama3-8b", "--devices", "h100", "--kv-cache-dtype", dtype, "--json") == 0
        tokens.append(json.loads(capsys.readouterr().out)["meshes"][0]["kv_tokens"])
    assert tokens[1] == 2 * tokens[0]


def test_8_bit_weights_leave_more_for_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for words in ((), ("--quantization", "fp8")):
        assert plan("--model", "llama3-8b", "--devices", "l4", "--json", *words) == 0
        found.append(json.loads(capsys.readouterr().out)["meshes"][0])
    assert found[1]["weight_bytes"] < 0.6 * found[0]["weight_bytes"]
    assert found[1]["kv_tokens"] > 1.5 * found[0]["kv_tokens"]


def test_a_model_folder_and_one_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "max_position_embeddings": 64}))
    assert plan("--model", str(tmp_path), "--devices", "l4:4", "--mesh", "2x2", "--tpot-ms", "20", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert [one["mesh"] for one in made["meshes"]] == ["2x2"] and made["settings"]["tpot"] == 0.02


def test_a_model_that_does_not_fit_exits_with_status_1_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "llama3-70b", "--devices", "h200:1") == 1
    assert "does not fit: one instance needs at least 2 of h200: --devices h200:2" in capsys.readouterr().out
    assert plan("--model", "llama3.1-8b", "--devices", "l4:1", "--json") == 1
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert made["mesh"] is None and "--max-model-len" in made["why"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "llama9", "--devices", "h200"), "model 'llama9' is neither a folder .* llama3-8b, llama3-70b, "),
        (("--model", "llama3-8b", "--devices", "h900:2"), "unknown device 'h900'; allowed: h200, "),
        (
            ("--model", "llama3-8b", "--devices", "h200:8", "--mesh", "3x4"),
            "mesh='3x4' needs 12 devices, but 'h200:8' has 8",
        ),
        (("--model", "llama3-8b", "--devices", "h200:8", "--mesh", "8"), "mesh='8' must be RxT"),
        (("--model", "llama3-8b", "--devices", "h200", "--max-model-len", "9000"), "9000 is above the model's 8192"),
        (("--model", "opt-30b", "--devices", "h200", "--prompt", "4096"), "prompt=4096 is above max_model_len=2048"),
        (
            ("--model", "llama3-8b", "--devices", "h200", "--context", "9000"),
            "context=9000 is above max_model_len=8192",
        ),
        (("--model", "llama3-8b", "--devices", "h200", "--block-size", "48"), "block_size=48 must be a power of two"),
        (
            ("--model", "llama3-8b", "--devices", "l4", "--compile"),
            "cannot compile for 'l4'; allowed: h200, h100, v5e, v6e",
        ),
        (("--model", "llama3-8b", "--devices", "h200:2", "--compile"), "add --mesh, one of 2x1, 1x2"),
    ],
)
def test_invalid_arguments_are_named(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert plan(*words) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_mesh_that_does_not_divide_the_model_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "qwen2.5-0.5b", "--devices", "h200:4", "--mesh", "1x4") == 1
    assert "tensor parallel size 4 does not fit Qwen2ForCausalLM: it must divide heads=14" in capsys.readouterr().out


def test_numbers_must_be_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--tpot-ms", "0"), ("--context", "1.5"), ("--prompt", "x")):
        with pytest.raises(SystemExit):
            plan("--model", "llama3-8b", "--devices", "h200", flag, value)
        assert f"{value!r} must be" in capsys.readouterr().err


def test_unknown_models_are_looked_up_on_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "someone/else", "--devices", "h200") == 1
    assert "model 'someone/else' is not a local folder" in capsys.readouterr().err


def test_no_device_is_started() -> None:
    code = """
import sys
from jaxserve.cli.main import main
status = main(["plan", "--model", "qwen3-8b", "--devices", "v6e:4", "--json"])
from jaxserve.engine.programs import compat
assert not compat.backend_started()
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"]["kind"] == "v6e"
