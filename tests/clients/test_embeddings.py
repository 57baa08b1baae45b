"""Embeddings through OpenAI's client, LangChain and LiteLLM."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.server.live import MODEL, Live

TEXTS = ["def main():", "import os", "def main():"]


@pytest.fixture(scope="module")
def vectors(live: Live) -> list[list[float]]:
    """The vectors of TEXTS, as numbers."""
    made = live.client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert made.usage.prompt_tokens > len(TEXTS)
    return [one.embedding for one in made.data]


def test_vectors(live: Live, vectors: list[list[float]]) -> None:
    """The client asks for base64 unless told otherwise, and decodes it."""
    assert [math.hypot(*one) for one in vectors] == pytest.approx([1, 1, 1], abs=1e-5)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-5) and vectors[0] != pytest.approx(vectors[1], abs=1e-2)
    made = live.client.embeddings.create(model=MODEL, input=TEXTS)
    assert [one.index for one in made.data] == [0, 1, 2]
    for one, expected in zip(made.data, vectors, strict=True):
        assert one.embedding == pytest.approx(expected, abs=1e-5)
    short = live.client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8).data[0].embedding
    length = math.hypot(*vectors[0][:8])
    assert short == pytest.approx([value / length for value in vectors[0][:8]], abs=1e-4)


def test_langchain(base: str, vectors: list[list[float]]) -> None:
    """`check_embedding_ctx_length` cuts texts by OpenAI's own tokenizer, which must be downloaded."""
    openai = pytest.importorskip("langchain_openai")
    given: dict[str, Any] = {"base_url": base, "api_key": "none", "model": MODEL, "max_retries": 0}
    made = openai.OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    for one, expected in zip(made.embed_documents(TEXTS), vectors, strict=True):
        assert one == pytest.approx(expected, abs=1e-5)
    assert made.embed_query(TEXTS[1]) == pytest.approx(vectors[1], abs=1e-5)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(base: str, vectors: list[list[float]], provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    given = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none"}
    made = litellm.embedding(**given, input=TEXTS)
    for one, expected in zip(made.data, vectors, strict=True):
        assert one["embedding"] == pytest.approx(expected, abs=1e-5)
