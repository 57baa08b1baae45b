"""Request bodies of the routes for vectors, with OpenAI's and vLLM's fields."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from jaxserve.sched.api.pooling import PoolingType
from jaxserve.server.openai import NOTHING, Part, Scheduled


class Pooling(Scheduled):
    """The fields that all requests for vectors share."""

    prefix: ClassVar[str]  # of the names of requests
    inputs: ClassVar[tuple[str, ...]]  # the fields with texts
    truncate_prompt_tokens: int | None = None  # keep only so many tokens at the end; -1: as many as fit
    pooling_type: PoolingType | None = None  # None: --pooling-type

    def given(self, name: str) -> Any:
        """Return the texts of a field."""
        return getattr(self, name)


class Document(Part):
    """A text, as an object."""

    text: str


class EmbeddingBody(Pooling):
    """The body of `POST /v1/embeddings`: a text, a list of texts, a list of token ids, or a list of such lists."""

    prefix, inputs = "embd", ("input",)
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None  # the first numbers of each vector only
    normalize: bool = True  # scale vectors to length 1


class PoolingBody(EmbeddingBody):
    """The body of `POST /pooling`: as of /v1/embeddings, but vectors are not scaled."""

    prefix = "pool"
    normalize: bool = False


# What other servers of scores know, and what would change the scores here.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation": (None, True),  # older names of use_activation
    "softmax": (None, True),
    "raw_scores": NOTHING,
    "chat_template_kwargs": NOTHING,
    "instruct": NOTHING,  # the server has --chat-template
    "instruction": NOTHING,
    "max_tokens_per_doc": NOTHING,
    "rank_fields": (*NOTHING, ["text"]),
}


class ScoreBody(Pooling):
    """The body of `POST /score`: one text and others to compare it with, or two lists of texts."""

    prefix, inputs, unsupported = "score", ("text_1", "text_2"), UNSUPPORTED
    text_1: Any
    text_2: Any
    use_activation: bool = True  # the sigmoid of a model that scores


class RerankBody(Pooling):
    """The body of `POST /rerank`, of Cohere, Jina and vLLM: a text, and others to sort by how relevant they are."""

    prefix, inputs, unsupported = "rerank", ("query", "documents"), UNSUPPORTED
    query: str
    documents: list[str | Document]
    top_n: int | None = None  # the best only; 0: all
    return_documents: bool = True
    use_activation: bool = True

    def given(self, name: str) -> Any:
        if name == "query":
            return self.query
        return [document if isinstance(document, str) else document.text for document in self.documents]
