"""Vectors and scores over HTTP: OpenAI's /v1/embeddings, and vLLM's /pooling, /score and /rerank."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from jaxserve.generation.generate import Piece, Submission
from jaxserve.generation.vectors import (
    Vector,
    check_dimensions,
    finished,
    paired,
    pooling_params,
    relevance,
    similarity,
    vector_of,
)
from jaxserve.sched.api.new_request import NewRequest, check_length
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.pooling import LAST
from jaxserve.server.answers import Answer, Gathered
from jaxserve.server.documented import body_schema
from jaxserve.server.embedding_bodies import EmbeddingBody, Pooling, PoolingBody, RerankBody, ScoreBody
from jaxserve.server.failures import wrong
from jaxserve.server.objectives import objectives_of
from jaxserve.server.openai import check_names
from jaxserve.server.prompts import Prompt
from jaxserve.server.replies import replied
from jaxserve.server.service import Service
from jaxserve.server.sse import while_connected

Data = list[dict[str, Any]]  # the entries of an answer
Scores = Callable[[list[Vector]], list[float]]  # of the pairs of texts of a request


@dataclass
class VectorAnswer(Answer):
    """The answer to a request for vectors."""

    data: Callable[[list[Vector]], Data] = lambda vectors: []
    named: str = "data"  # the field of the entries
    bare: bool = False  # without id and creation time, as OpenAI's
    vectors: dict[int, Vector] = field(default_factory=dict)  # by submission

    def add(self, number: int, piece: Piece) -> Gathered:
        if piece.pooled:
            self.vectors[number] = vector_of(piece.pooled)
        return super().add(number, piece)

    def whole(self) -> dict[str, Any]:
        body: dict[str, Any] = {"object": "list", "model": self.model, "usage": self.usage}
        if not self.bare:
            body |= {"id": self.id, "created": self.created}
        return {**body, self.named: self.data([self.vectors[number] for number in range(len(self.jobs))])}


def add_pooling(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingBody))
    async def embed(request: Request) -> Response:
        return await replied(request, _answer(service, request, EmbeddingBody))

    @app.post("/pooling", openapi_extra=body_schema(PoolingBody))
    async def pool(request: Request) -> Response:
        return await replied(request, _answer(service, request, PoolingBody))

    @app.post("/score", openapi_extra=body_schema(ScoreBody))
    @app.post("/v1/score", openapi_extra=body_schema(ScoreBody))
    async def score(request: Request) -> Response:
        return await replied(request, _answer(service, request, ScoreBody))

    @app.post("/rerank", openapi_extra=body_schema(RerankBody))
    @app.post("/v1/rerank", openapi_extra=body_schema(RerankBody))
    @app.post("/v2/rerank", openapi_extra=body_schema(RerankBody))
    async def rerank(request: Request) -> Response:
        return await replied(request, _answer(service, request, RerankBody))


async def _answer(service: Service, request: Request, kind: type[Pooling]) -> Response:
    body = await service.read(request, kind)
    answer = await while_connected(request.receive, _prepare(service, body, request), service.ending)
    return JSONResponse(await while_connected(request.receive, service.whole(answer), service.ending))


async def _prepare(service: Service, body: Pooling, request: Request) -> VectorAnswer:
    """Check a body, and make the submissions of all its texts. Raises InvalidValue that names the field."""
    service.check_model(body.model)
    client, engine, config = request.state.client, service.engine, service.config
    limits = service.limits.of(client)
    limits.check(body)
    check_names(body)
    head = engine.info.score_head if isinstance(body, ScoreBody | RerankBody) else b""
    pooling = body.pooling_type or (LAST if head else config.pooling_type)
    if head and pooling != LAST:
        raise wrong("pooling_type", pooling, f"must be {LAST}: this model scores pairs")
    params = replace(pooling_params(pooling), truncate_prompt_tokens=body.truncate_prompt_tokens)
    goals = objectives_of(body, request.headers, config, limits.tiers)
    name = f"{body.prefix}-{body.request_id or request.state.request_id}"
    salt = service.keys.salt(client, body.cache_salt)
    _check(body, engine.info.hidden_size)
    jobs: list[list[Submission]] = []
    for field_name, prompts in await (_pairs if head else _texts)(service, body, params):
        jobs.append([])
        for text, tokens in prompts:
            check_length(len(tokens), engine.info.max_model_len, params, field_name)
            key = f"{name}-{sum(map(len, jobs))}"
            new = NewRequest(tuple(tokens), params, goals.slo, goals.priority, goals.tier, key, salt, client=client)
            jobs[-1].append(Submission(new, text))
    every = [job for some in jobs for job in some]
    return VectorAnswer(
        id=name,
        model=body.model or config.names[0],
        chat=False,
        jobs=every,
        tokenizer=service.tokenizer,
        client=client,
        trace=service.trace_of(request.headers, name),
        data=_data(body, _scores(body, head, [len(some) for some in jobs])),
        named="results" if isinstance(body, RerankBody) else "data",
        bare=type(body) is EmbeddingBody,
    )


def _check(body: Pooling, size: int) -> None:
    if isinstance(body, EmbeddingBody):
        check_dimensions(body.dimensions, size)
    if isinstance(body, RerankBody) and body.top_n is not None and body.top_n < 0:
        raise wrong("top_n", body.top_n, "must be at least 1, or 0 for all documents")


async def _texts(service: Service, body: Pooling, params: SamplingParams) -> list[tuple[str, list[Prompt]]]:
    special, check = body.add_special_tokens is not False, service.engine.check_outputs
    return [
        (name, await service.prompts.texts_of(body.given(name), name, special, params, check)) for name in body.inputs
    ]


async def _pairs(service: Service, body: Pooling, params: SamplingParams) -> list[tuple[str, list[Prompt]]]:
    """Return a prompt for each pair of texts, for a model that scores."""
    first, second = (given if isinstance(given := body.given(name), list) else [given] for name in body.inputs)
    pairs = paired(first, second, (body.inputs[0], body.inputs[1]))
    special, check = body.add_special_tokens, service.engine.check_outputs
    return [(body.inputs[1], await service.prompts.pairs_of(pairs, body.inputs, special, params, check))]


def _scores(body: Pooling, head: bytes, counts: list[int]) -> Scores:
    """Return what scores the vectors of a request. counts: of its texts, by field, if there is no head."""
    if head:
        activated = not isinstance(body, ScoreBody | RerankBody) or body.use_activation
        return lambda vectors: [relevance(vector, head, activated) for vector in vectors]
    if isinstance(body, EmbeddingBody):
        return lambda vectors: []
    pairs = paired(list(range(counts[0])), list(range(counts[0], sum(counts))), (body.inputs[0], body.inputs[1]))
    return lambda vectors: [similarity(vectors[one], vectors[other]) for one, other in pairs]


def _data(body: Pooling, scores: Scores) -> Callable[[list[Vector]], Data]:
    """Return what makes the entries of an answer from the vectors of its inputs."""
    if isinstance(body, EmbeddingBody):
        return lambda vectors: _encoded(body, vectors)
    if isinstance(body, RerankBody):
        return lambda vectors: _sorted(body, scores(vectors))
    return lambda vectors: [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores(vectors))
    ]


def _sorted(body: RerankBody, scores: list[float]) -> Data:
    texts = body.given("documents")
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    shown = [{"document": {"text": text}} if body.return_documents else {} for text in texts]
    return [{"index": index, **shown[index], "relevance_score": scores[index]} for index in best]


def _encoded(body: EmbeddingBody, vectors: list[Vector]) -> Data:
    kind, name = ("pooling", "data") if isinstance(body, PoolingBody) else ("embedding", "embedding")
    encoded = []
    for index, vector in enumerate(vectors):
        done = finished(vector, body.dimensions, body.normalize)
        plain = done.tolist()
        coded = base64.b64encode(done.astype("<f4").tobytes()).decode() if body.encoding_format == "base64" else plain
        encoded.append({"object": kind, "index": index, name: coded})
    return encoded
