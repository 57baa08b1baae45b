"""A folder of a model may come from anywhere: what is wrong with it is an error by name, soon and without a crash."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.demo import model_path
from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.models.registry import load_spec, spec_from_config
from jaxserve.models.source import sampling_defaults
from jaxserve.models.weights import load_weights
from jaxserve.server.model_list import expected_length
from jaxserve.tokenizer import Tokenizer
from tests.support.models.driver import mesh

DEMO = model_path()
WHOLE = (DEMO / "model.safetensors").read_bytes()
SIZE = struct.unpack("<Q", WHOLE[:8])[0]
HEADER: dict[str, Any] = json.loads(WHOLE[8 : 8 + SIZE])
DATA = WHOLE[8 + SIZE :]
FIRST, SECOND = [name for name in HEADER if name != "__metadata__"][:2]
DEEP = b"[" * 100_000 + b"]" * 100_000
INDEX = "model.safetensors.index.json"


def framed(header: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header


def described(**fields: Any) -> bytes:
    """Return the demo model's weights with another description of the first tensor."""
    return framed(json.dumps({**HEADER, FIRST: {**HEADER[FIRST], **fields}}).encode()) + DATA


def indexed(where: Any) -> bytes:
    return json.dumps({"weight_map": where}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(DEMO, copy)
    return copy


FILES: dict[str, tuple[str, bytes, str]] = {
    "header of 2^62 bytes": ("model.safetensors", framed(b"{}", 1 << 62), "header too large"),
    "header cut off": ("model.safetensors", framed(b"{}", 99_000_000), "the header itself is cut off"),
    "header that is no JSON": ("model.safetensors", framed(b"hello"), "invalid JSON in header"),
    "header that is no object": ("model.safetensors", framed(b"[]"), "invalid JSON in header"),
    "nested header": ("model.safetensors", framed(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), "cannot be read"),
    "nested shape": (
        "model.safetensors", framed(b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":%b}}' % DEEP), "cannot be read",
    ),
    "truncated": ("model.safetensors", WHOLE[: len(WHOLE) // 2], "the file is truncated"),
    "empty": ("model.safetensors", b"", "header too small"),
    "overlap": (
        "model.safetensors", described(data_offsets=HEADER[SECOND]["data_offsets"]), "invalid offset for tensor",
    ),
    "negative offset": ("model.safetensors", described(data_offsets=[-4, 0]), "invalid JSON in header"),
    "shape beyond 64 bits": ("model.safetensors", described(shape=[1 << 62, 1 << 62]), "overflow"),
    "index of another folder": (INDEX, indexed({FIRST: "../../../etc/passwd"}), "'../../../etc/passwd' is not in the"),
    "index of an absolute path": (INDEX, indexed({FIRST: "/etc/passwd"}), "'/etc/passwd' is not in the folder"),
    "index of a number": (INDEX, indexed({FIRST: 3}), "expected a 'weight_map'"),
    "nested index": (INDEX, DEEP, "nested too deeply"),
    "nested config": ("config.json", DEEP, "nested too deeply"),
    "config that is no object": ("config.json", b"[]", "must hold a JSON object"),
    "config in UTF-16": ("config.json", "{}".encode("utf-16"), "not valid JSON"),
    "nested generation config": ("generation_config.json", DEEP, "nested too deeply"),
    "EOS that is none": ("generation_config.json", b'{"eos_token_id": ["a"]}', "must be a token id"),
    "nested tokenizer config": ("tokenizer_config.json", DEEP, "nested too deeply"),
    "added token without a number": (
        "tokenizer_config.json", b'{"eos_token":"x","added_tokens_decoder":{"z":{"content":"x"}}}', "cannot be read",
    ),
    "added tokens in a list": (
        "tokenizer_config.json", b'{"eos_token":"x","added_tokens_decoder":[1]}', "cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_by_name(folder: Path, name: str) -> None:
    file, content, message = FILES[name]
    (folder / file).write_bytes(content)
    with pytest.raises(JaxserveError, match=message):
        load_weights(folder, load_spec(folder), "float32", [mesh(1)])


CONFIGS: dict[str, tuple[Any, str]] = {
    "vocab_size": (1 << 50, "vocab_size=1125899906842624 must be at most"),
    "num_hidden_layers": (10**9, "num_hidden_layers=1000000000 must be at most 1024"),
    "num_attention_heads": (10**12, "num_attention_heads=1000000000000 must be at most"),
    "hidden_size": (float("inf"), "hidden_size=inf must be at most"),
    "intermediate_size": (float("nan"), "intermediate_size=nan must be at most"),
    "max_position_embeddings": (10**18, "max_position_embeddings="),
    "rms_norm_eps": (float("nan"), "must be finite"),
    "rope_theta": (float("inf"), "must be finite"),
    "architectures": ({"a": 1}, "wrong kind"),
    "num_key_value_heads": ("x" * 100_000, "wrong kind"),
    "rope_scaling": ([1, 2], "wrong kind"),
    "quantization_config": ("x", "wrong kind"),
    "eos_token_id": (["x"], "must be a token id"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_value_is_refused_by_name_before_anything_is_made_of_it(name: str) -> None:
    value, message = CONFIGS[name]
    config = json.loads((DEMO / "config.json").read_text())
    with pytest.raises(InvalidValue, match=message) as refused:
        spec_from_config({**config, name: value})
    assert len(str(refused.value)) < 500


def test_families_are_named_at_most_in_part() -> None:
    with pytest.raises(InvalidValue, match="is not supported") as refused:
        spec_from_config({"architectures": ["../x" * 100_000]})
    assert len(str(refused.value)) < 1000


def test_ids_outside_the_vocabulary_end_nothing(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, -5, 10**30]}))
    eos = load_spec(folder).eos
    assert 7 in eos and all(0 <= id < 4096 for id in eos)


def test_the_problems_of_many_tensors_are_named_in_part(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1000}))
    with pytest.raises(JaxserveError, match=r"tensors:[^$]*and \d+ more$") as refused:
        load_weights(folder, load_spec(folder), "float32", [mesh(1)])
    assert len(str(refused.value)) < 50_000


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_pipe_is_no_file(folder: Path, file: str) -> None:
    """Opening one would wait for a writer for ever."""
    (folder / file).unlink()
    os.mkfifo(folder / file)
    try:
        load_weights(folder, load_spec(folder), "float32", [mesh(1)])
        Tokenizer.load(folder)
    except JaxserveError:
        return
    assert file == "generation_config.json"  # which need not be there


def test_a_link_to_another_file_shows_nothing_of_it(folder: Path, tmp_path: Path) -> None:
    """Links are followed, as the Hub's cache consists of them."""
    (tmp_path / "secret").write_text("sesame: open")
    for file in ("config.json", "model.safetensors"):
        kept = (folder / file).read_bytes()
        (folder / file).unlink()
        (folder / file).symlink_to(tmp_path / "secret")
        with pytest.raises(JaxserveError) as refused:
            load_weights(folder, load_spec(folder), "float32", [mesh(1)])
        assert "sesame" not in str(refused.value)
        (folder / file).unlink()
        (folder / file).write_bytes(kept)


def _nested(document: dict[str, Any]) -> str:
    depth = 50_000
    normalizer = '{"type":"Sequence","normalizers":[' * depth + '{"type":"NFC"}' + "]}" * depth
    return json.dumps({**document, "normalizer": "@"}).replace('"@"', normalizer)


def _split(pattern: str) -> Callable[[dict[str, Any]], str]:
    def changed(document: dict[str, Any]) -> str:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return json.dumps({**document, "pre_tokenizer": split})

    return changed


TOKENIZERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "nested lists": lambda document: DEEP.decode(),
    "nested normalizers": _nested,
    "nested expression": _split("(" * 200_000 + "a" + ")" * 200_000),
    "merges of unknown tokens": lambda document: json.dumps(
        {**document, "model": {**document["model"], "merges": [["q", "zz"]]}}
    ),
    "no object": lambda document: "3",
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_is_refused_by_name(folder: Path, name: str) -> None:
    path = folder / "tokenizer.json"
    path.write_text(TOKENIZERS[name](json.loads(path.read_text())))
    with pytest.raises(InvalidValue, match="tokenizer"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')  # which is looked for in tokenizer.json
    with pytest.raises(InvalidValue, match="tokenizer"):
        load_spec(folder)


def test_code_of_a_repository_is_neither_run_nor_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": {"AutoConfig": "code.Config"}}))
    given = {"tokenizer_class": "New", "auto_map": {"AutoTokenizer": ["code.New", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    (tmp_path / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass New: pass\nclass Config: pass\n"
    )
    answers = io.StringIO("y\ny\n")
    monkeypatch.setattr("sys.stdin", answers)
    with pytest.raises(InvalidValue, match="no tokenizer could be loaded"):
        Tokenizer.load(tmp_path)
    assert not (tmp_path / "ran").exists() and answers.tell() == 0 and "[y/N]" not in capsys.readouterr().out


def test_an_expression_that_never_ends_refuses_the_text(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(_split("(x+x+)+y")(json.loads(path.read_text())))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("ab")
    with pytest.raises(InvalidValue, match="cannot encode this text"):
        tokenizer.encode("x" * 40)


@pytest.mark.parametrize("content", [DEEP, b"[]", b'{"max_position_embeddings": Infinity}', b"\xff"])
def test_the_port_opens_whatever_the_folder_holds(folder: Path, content: bytes) -> None:
    """What is wrong is reported by the start of the engine, which comes after."""
    (folder / "config.json").write_bytes(content)
    assert expected_length(ServeConfig.load(model=str(folder))) is None
    (folder / "generation_config.json").write_bytes(content)
    if content[:1] != b"{":
        with pytest.raises(InvalidValue, match=r"generation_config\.json"):
            sampling_defaults(ServeConfig.load(model=str(folder)))
