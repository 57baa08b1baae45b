"""Vectors of the demo model over HTTP and from Python, against transformers."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.generation.vectors import Vector
from jaxserve.llm import LLM
from tests.support.server.live import MODEL, SMALL, Live

TEXTS = ["def main():", "the quick brown fox " * 20, "x", "import os\nimport sys\n"]
CLOSE = 1e-4


@pytest.fixture(scope="module")
def states() -> list[Vector]:
    """The hidden states [T, E] of each text."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = jaxserve.demo.model_path()
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(tokenizer(text, return_tensors="pt").input_ids).last_hidden_state[0].numpy() for text in TEXTS]


def pooled(states: list[Vector], pooling: str) -> list[Vector]:
    return [one[-1] if pooling == "last" else one.mean(0) for one in states]


def unit(vector: Vector) -> Vector:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_openai_client_gets_the_embeddings_of_transformers(
    live: Live, states: list[Vector], pooling: str, encoding: Any
) -> None:
    more = {"pooling_type": pooling}
    made = live.client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=encoding, extra_body=more)
    assert [one.index for one in made.data] == [0, 1, 2, 3] and made.object == "list"
    for one, expected in zip(made.data, pooled(states, pooling), strict=True):
        given: Any = one.embedding
        if encoding == "base64":  # asked for by name, it is not decoded by the client
            given = np.frombuffer(base64.b64decode(given), "<f4")
        np.testing.assert_allclose(given, unit(expected), atol=CLOSE)
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, states))


def test_the_client_decodes_by_itself_and_dimensions_cut(live: Live, states: list[Vector]) -> None:
    one = live.client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=7, user="me").data[0].embedding
    np.testing.assert_allclose(one, unit(states[0][-1][:7]), atol=CLOSE)


def test_token_ids_are_an_input(live: Live) -> None:
    ids = live.http.post("/tokenize", json={"prompt": TEXTS[1]}).json()["tokens"]
    for given in (ids, [ids]):
        of_ids, of_text = (
            live.client.embeddings.create(model=MODEL, input=one).data[0].embedding for one in (given, TEXTS[1])
        )
        np.testing.assert_allclose(of_ids, of_text, atol=CLOSE)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooling_and_scores(live: Live, states: list[Vector], pooling: str) -> None:
    expected = pooled(states, pooling)
    made = live.http.post("/pooling", json={"input": TEXTS, "pooling_type": pooling}).json()
    for one, vector in zip(made["data"], expected, strict=True):
        assert one["object"] == "pooling"
        np.testing.assert_allclose(one["data"], vector, atol=CLOSE)
    for first, second in ((TEXTS[0], TEXTS[1:]), (TEXTS[:2], TEXTS[2:])):
        body = {"text_1": first, "text_2": second, "pooling_type": pooling}
        made = live.http.post("/v1/score", json=body).json()
        ones = expected[:1] * 3 if first == TEXTS[0] else expected[:2]
        others = expected[1:] if first == TEXTS[0] else expected[2:]
        cosines = [float(unit(a) @ unit(b)) for a, b in zip(ones, others, strict=True)]
        np.testing.assert_allclose([one["score"] for one in made["data"]], cosines, atol=CLOSE)
        assert made["object"] == "list" and made["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["x", 1]}, "input"),
        ("/v1/embeddings", {"input": {"text": "x"}}, "input"),
        ("/v1/embeddings", {"input": [1, 4096]}, "input"),
        ("/v1/embeddings", {"input": [[1], []]}, "input"),
        ("/v1/embeddings", {"input": [1] * 256}, "input"),
        ("/v1/embeddings", {"input": "x " * 600}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 1025}, "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 9}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "pooling_type": "cls"}, "pooling_type"),
        ("/v1/embeddings", {"input": "x", "cache_salt": ""}, "cache_salt"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/pooling", {"input": None}, "input"),
        ("/v1/score", {"text_1": "x"}, "text_2"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_1"),
        ("/v1/score", {"text_1": 1.5, "text_2": ["x"]}, "text_1"),
    ],
)
def test_bad_input_names_the_field(plain: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = plain.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_from_python(engine: Any, tokenizer: Any, states: list[Vector]) -> None:
    llm = LLM(engine=engine, tokenizer_object=tokenizer, config=ServeConfig.load(pooling_type="mean", **SMALL))
    last, mean = pooled(states, "last"), pooled(states, "mean")
    made = llm.embed(TEXTS, use_tqdm=False)
    np.testing.assert_allclose([one.outputs.embedding for one in made], [unit(one) for one in mean], atol=CLOSE)
    raw = llm.embed(TEXTS[0], pooling_type="last", normalize=False, dimensions=5, use_tqdm=False)
    np.testing.assert_allclose(raw[0].outputs.embedding, last[0][:5], atol=CLOSE)
    assert raw[0].outputs.hidden_size == 5 and raw[0].prompt_token_ids == tokenizer.encode(TEXTS[0])
    scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    assert [one.outputs.score for one in scores] == pytest.approx(
        [float(unit(mean[0]) @ unit(one)) for one in mean], abs=CLOSE
    )
    for wrong, param in (({"pooling_type": "max"}, "pooling"), ({"dimensions": 0}, "dimensions")):
        with pytest.raises(InvalidValue, match=param):
            llm.embed("x", **wrong)
    with pytest.raises(InvalidValue, match="data_1 has 2 entries and data_2 has 3"):
        llm.score(TEXTS[:2], TEXTS[:3])


def test_no_program_is_compiled_later(live: Live) -> None:
    assert live.engine.stats().compilations_after_warmup == 0
