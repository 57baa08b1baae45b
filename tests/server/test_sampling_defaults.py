"""Requests that leave sampling parameters out get those of the model's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.models.source import check_names, sampling_defaults
from jaxserve.sched.api.params import SamplingParams
from jaxserve.tokenizer import Tokenizer
from tests.support.server.double import Double

# As Qwen3 has it; the rest is not about one request.
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3], "max_new_tokens": 9}
OF_QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def folder(path: Path, given: Any = QWEN) -> str:
    (path / "generation_config.json").write_text(given if isinstance(given, str) else json.dumps(given))
    return str(path)


def test_every_api_takes_them_and_a_field_of_the_request_wins(fake: Any, tmp_path: Path) -> None:
    live = fake(config={"generation_config": folder(tmp_path)})
    for route, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "model": "jaxserve-demo"}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
    ):
        assert live.http.post(route, json=body).status_code == 200
        params = live.engine.submitted[-1].params
        assert {name: getattr(params, name) for name in OF_QWEN} == OF_QWEN
        assert live.http.post(route, json={**body, "temperature": 0.0, "top_k": None}).status_code == 200
        params = live.engine.submitted[-1].params
        assert (params.temperature, params.top_k, params.top_p) == (0.0, 20, 0.95)
    assert live.http.get("/v1/models").json()["data"][0]["default_sampling_params"] == OF_QWEN


def test_a_model_without_the_file_and_the_flag_vllm_have_none(fake: Any, tmp_path: Path) -> None:
    live = fake(config={"generation_config": "vllm"})
    assert live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert live.engine.submitted[-1].params == SamplingParams(max_tokens=1)
    assert "default_sampling_params" not in live.http.get("/v1/models").json()["data"][0]
    assert sampling_defaults(ServeConfig(model=str(tmp_path))) == {}
    assert sampling_defaults(ServeConfig(model=folder(tmp_path))) == OF_QWEN
    assert sampling_defaults(ServeConfig(model=folder(tmp_path), generation_config="vllm")) == {}


def test_random_weights_ask_no_hub_and_a_missing_model_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[str]()

    def download(name: str, **more: Any) -> str:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert sampling_defaults(ServeConfig(model="llama3-8b", load_format="dummy")) == {} and not asked
    assert sampling_defaults(ServeConfig(model="someone/model")) == {} and asked == ["someone/model"]
    assert "requests that set no sampling get vLLM's defaults" in caplog.text


def test_a_folder_without_the_file_is_named_before_an_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="must be auto, vllm, or a folder with generation_config"):
        check_names(ServeConfig(generation_config=str(tmp_path)))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "cannot be used"),
        ("[]", "cannot be used"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 7}, "top_p=7"),
        (None, "generation_config=.* must be auto, vllm, or a folder with generation_config.json"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, given: Any, why: str) -> None:
    path = str(tmp_path) if given is None else folder(tmp_path, given)
    with pytest.raises(InvalidValue, match=why):
        sampling_defaults(ServeConfig(generation_config=path))


def test_offline_as_in_vllm(tmp_path: Path, tokenizer: Tokenizer) -> None:
    engine = Double()
    llm = LLM(config=ServeConfig(generation_config=folder(tmp_path)), engine=engine, tokenizer_object=tokenizer)
    assert llm.get_default_sampling_params() == SamplingParams(**OF_QWEN)
    llm.generate(["x"])
    llm.generate(["x"], SamplingParams(max_tokens=1))
    assert [request.params.temperature for request in engine.submitted] == [0.6, 1.0]
