"""Scores of small random Qwen 3 rerankers, in both published forms, against transformers."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.llm import LLM
from jaxserve.models.score_head import score_head
from jaxserve.server.service import Service
from jaxserve.settings.overrides import Overrides
from jaxserve.tokenizer import Tokenizer
from tests.support.models.driver import SMALL as SIZES
from tests.support.models.driver import fill
from tests.support.server.live import ALONE, Live

ROOT = Path(__file__).parents[2]
NO, YES = "no", "true"  # of the demo model's tokenizer, which has no "yes"
QUERY, DOCUMENTS = "def main(", ["import os", "return None", "class Main:\n    pass", "x"]
TEMPLATE = "<judge>{{ messages[0].role }}: {{ messages[0].content }}\n{{ messages[1].role }}: {{ messages[1].content }}"
CLOSE = 1e-4
OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": [NO, YES],
    "is_original_qwen3_reranker": True,
}


class Reranker(NamedTuple):
    """A checkpoint, a server of it, and transformers' model."""

    live: Live
    llm: LLM
    model: Any
    template: str | None

    def expected(self, pairs: list[tuple[str, str]]) -> list[float]:
        tokenizer, found = Tokenizer.load(jaxserve.demo.model_path()), []
        for query, document in pairs:
            text = f"<judge>query: {query}\ndocument: {document}" if self.template else query + document
            with torch.no_grad():
                logits = self.model(torch.tensor([tokenizer.encode(text, not self.template)])).logits[0]
            ids = [tokenizer.hf.convert_tokens_to_ids(word) for word in (NO, YES)]
            original = logits.ndim == 2  # [tokens, V]
            found.append(logits[-1, ids].softmax(-1)[1].item() if original else logits.sigmoid().item())
        return found


def checkpoint(folder: Path, kind: str, **changes: Any) -> Any:
    """Write a small Qwen 3 of transformers with the tokenizer of the demo model."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 4096, "max_position_embeddings": 256, "head_dim": 16, "pad_token_id": 0, **changes}
    model = getattr(transformers, f"Qwen3For{kind}")(transformers.Qwen3Config(**sizes)).eval().float()
    fill(model)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(jaxserve.demo.model_path() / name, folder / name)
    return model


CASES = {
    "as published, tied, a template": ("CausalLM", {"tie_word_embeddings": True}, TEMPLATE),
    "converted": ("SequenceClassification", {"num_labels": 1}, None),
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def reranker(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reranker]:
    kind, changes, template = CASES[request.param]
    folder = tmp_path_factory.mktemp("reranker")
    model = checkpoint(folder, kind, **changes)
    overrides = json.dumps(OVERRIDES) if kind == "CausalLM" else None
    config = ServeConfig.load(model=str(folder), mesh="1x1", hf_overrides=overrides, chat_template=template, **ALONE)
    llm = LLM(config=config)
    live = Live(Service(llm.engine, llm.tokenizer, config))
    yield Reranker(live, llm, model, template)
    live.stop()
    llm.close()


def test_scores_are_those_of_transformers(reranker: Reranker) -> None:
    want = reranker.expected([(QUERY, document) for document in DOCUMENTS])
    assert np.ptp(want) > 0.01  # otherwise the test could not fail
    for route in ("/score", "/v1/score"):
        body: dict[str, Any] = {"text_1": QUERY, "text_2": DOCUMENTS}
        answer = reranker.live.http.post(route, json=body).json()
        np.testing.assert_allclose([one["score"] for one in answer["data"]], want, atol=CLOSE)
        raw = reranker.live.http.post(route, json={**body, "use_activation": False}).json()["data"]
        np.testing.assert_allclose([1 / (1 + math.exp(-one["score"])) for one in raw], want, atol=CLOSE)
    pairs = reranker.live.http.post("/score", json={"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[2:]}).json()["data"]
    want_pairs = reranker.expected(list(zip(DOCUMENTS[:2], DOCUMENTS[2:], strict=True)))
    np.testing.assert_allclose([one["score"] for one in pairs], want_pairs, atol=CLOSE)
    scores = reranker.llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in scores], want, atol=CLOSE)


def test_documents_are_sorted_by_relevance(reranker: Reranker) -> None:
    want = reranker.expected([(QUERY, document) for document in DOCUMENTS])
    order = sorted(range(len(want)), key=lambda index: -want[index])
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = reranker.live.http.post(route, json={"query": QUERY, "documents": documents}).json()
        assert [one["index"] for one in answer["results"]] == order
        assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[index] for index in order]
        got = [one["relevance_score"] for one in answer["results"]]
        np.testing.assert_allclose(got, [want[index] for index in order], atol=CLOSE)
        assert answer["usage"]["total_tokens"] > 0
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
    best = reranker.live.http.post("/rerank", json=body).json()["results"]
    assert [one["index"] for one in best] == order[:2] and all("document" not in one for one in best)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/rerank", {"query": "x"}, "documents"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"query": "x", "documents": ["y"] * 1025}, "documents"),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "x", "documents": ["y " * 600]}, "documents"),
        ("/rerank", {"query": "x", "documents": ["y"], "pooling_type": "mean"}, "pooling_type"),
        ("/rerank", {"query": "x", "documents": ["y"] * 1024}, "documents"),  # more than may wait
        ("/rerank", {"query": "x", "documents": [{"title": "y"}]}, "documents.0"),
        ("/rerank", {"query": "x", "documents": ["y"], "max_tokens_per_doc": 4}, "max_tokens_per_doc"),
        ("/rerank", {"query": "x", "documents": ["y"], "rank_fields": ["title"]}, "rank_fields"),
        ("/rerank", {"query": "x", "documents": ["y"], "instruction": "z"}, "instruction"),
        ("/rerank", {"query": "x", "documents": ["y"], "activation": False}, "activation"),
        ("/rerank", {"query": "x", "documents": ["y"], "raw_scores": True}, "raw_scores"),
        ("/rerank", {"query": "x" * 140_000, "documents": ["y"] * 128, "truncate_prompt_tokens": 4}, "query"),
        ("/score", {"text_1": "x", "text_2": "y", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/score", {"text_1": "x", "text_2": "y", "softmax": False}, "softmax"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_1"),
        ("/score", {"text_1": [1, 2], "text_2": [3, 4]}, "text_1"),
        ("/score", {"text_1": "x", "text_2": [[3, 4]]}, "text_2"),
    ],
)
def test_bad_input_names_the_field(reranker: Reranker, route: str, body: dict[str, Any], param: str) -> None:
    answer = reranker.live.http.post(route, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_the_template_of_the_guide_is_that_of_qwen3_reranker(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guide/embeddings.md").read_text(encoding="utf-8")
    file = tmp_path / "qwen3_reranker.jinja"
    file.write_text(re.findall(r"```text\n(<\|im_start\|>.*?)```", guide, re.DOTALL)[0], encoding="utf-8")
    text, special = Tokenizer.load(jaxserve.demo.model_path(), chat_template=str(file)).pair("Q?", "D.")
    instruct = "Given a web search query, retrieve relevant passages that answer the query"
    assert not special and text == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruct}\n<Query>: Q?\n<Document>: D.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_from_python_only_texts_are_scored(reranker: Reranker) -> None:
    with pytest.raises(InvalidValue, match="must be a text"):
        reranker.llm.score("x", {"prompt_token_ids": [5]}, use_tqdm=False)


def test_models_without_a_score_head_rerank_by_the_cosine_of_vectors(live: Live) -> None:
    scored = live.http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    ranked = live.http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    by_index = {one["index"]: one["relevance_score"] for one in ranked}
    np.testing.assert_allclose([by_index[index] for index in range(4)], [one["score"] for one in scored], atol=CLOSE)
    assert [one["relevance_score"] for one in ranked] == sorted(by_index.values(), reverse=True)


@pytest.mark.parametrize(
    ("kind", "changes", "overrides", "message"),
    [
        ("SequenceClassification", {"num_labels": 3}, {}, "with 3 labels is not supported"),
        ("CausalLM", {}, {"classifier_from_token": (NO, YES)}, "is_original_qwen3_reranker: true"),
        ("CausalLM", {}, {**OVERRIDES, "classifier_from_token": (YES,)}, "is_original_qwen3_reranker: true"),
        ("CausalLM", {}, {**OVERRIDES, "classifier_from_token": (NO, "yes")}, "'yes' is no token"),
        ("Model", {}, {**OVERRIDES, "architectures": ("Qwen3ForSequenceClassification",)}, "supported"),
    ],
)
def test_checkpoints_that_cannot_score_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    if kind == "Model":
        transformers.Qwen3Model(transformers.Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    else:
        checkpoint(tmp_path, kind, **changes)
    given = Overrides(**{name: tuple(v) if isinstance(v, list) else v for name, v in overrides.items()})
    with pytest.raises(InvalidValue, match=message):
        score_head(tmp_path, given, (jaxserve.demo.model_path() / "tokenizer.json").read_text)


@pytest.mark.parametrize("given", ["{", '{"rope_theta": 1}', '{"architectures": ["BertModel"]}', "[]"])
def test_other_overrides_are_refused(given: str) -> None:
    with pytest.raises(InvalidValue, match="hf_overrides"):
        ServeConfig.load(hf_overrides=given)


def test_the_keys_of_a_config_json_are_those_of_the_flag(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "CausalLM")
    read = (jaxserve.demo.model_path() / "tokenizer.json").read_text
    flag = Overrides(("Qwen3ForSequenceClassification",), (NO, YES), True)
    by_flag = score_head(tmp_path, flag, read)
    assert score_head(tmp_path, Overrides(), read) == b""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **OVERRIDES}))
    assert score_head(tmp_path, Overrides(), read) == by_flag
    no, yes = (Tokenizer.load(jaxserve.demo.model_path()).hf.convert_tokens_to_ids(word) for word in (NO, YES))
    rows = model.lm_head.weight.detach().numpy()
    np.testing.assert_allclose(np.frombuffer(by_flag, "<f4"), rows[yes] - rows[no], atol=1e-6)
