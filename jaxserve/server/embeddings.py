"""Vectors over HTTP: OpenAI's /v1/embeddings, and vLLM's /pooling and /v1/score."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from jaxserve.generation.generate import Piece, Submission, check_length
from jaxserve.generation.vectors import (
    Vector,
    check_dimensions,
    finished,
    paired,
    pooling_params,
    similarity,
    vector_of,
)
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.server.answers import Answer, Gathered
from jaxserve.server.documented import body_schema
from jaxserve.server.embedding_bodies import EmbeddingBody, Pooling, PoolingBody, ScoreBody
from jaxserve.server.failures import response_of
from jaxserve.server.objectives import objectives_of
from jaxserve.server.openai import check_names
from jaxserve.server.service import Service
from jaxserve.server.sse import Disconnected, while_connected

Data = list[dict[str, Any]]  # the entries of an answer


@dataclass
class VectorAnswer(Answer):
    """The answer to a request for vectors."""

    data: Callable[[list[Vector]], Data] = lambda vectors: []
    bare: bool = False  # without id and creation time, as OpenAI's
    vectors: dict[int, Vector] = field(default_factory=dict)  # by submission

    def add(self, number: int, piece: Piece) -> Gathered:
        """Keep the vector of a submission."""
        if piece.pooled:
            self.vectors[number] = vector_of(piece.pooled)
        return super().add(number, piece)

    def whole(self) -> dict[str, Any]:
        """Return the response body."""
        body: dict[str, Any] = {"object": "list", "model": self.model, "usage": self.usage}
        if not self.bare:
            body |= {"id": self.id, "created": self.created}
        return {**body, "data": self.data([self.vectors[number] for number in range(len(self.jobs))])}


def add_pooling(app: FastAPI, service: Service) -> None:
    """Add the routes for vectors."""

    @app.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingBody))
    async def embed(request: Request) -> Response:
        return await _answer(service, request, EmbeddingBody)

    @app.post("/pooling", openapi_extra=body_schema(PoolingBody))
    async def pool(request: Request) -> Response:
        return await _answer(service, request, PoolingBody)

    @app.post("/v1/score", openapi_extra=body_schema(ScoreBody))
    async def score(request: Request) -> Response:
        return await _answer(service, request, ScoreBody)


async def _answer(service: Service, request: Request, kind: type[Pooling]) -> Response:
    try:
        body = await service.read(request, kind)
        preparing = _prepare(service, body, request)
        answer = await while_connected(request.receive, preparing, service.ending)
        return JSONResponse(await while_connected(request.receive, service.whole(answer), service.ending))
    except (Disconnected, ClientDisconnect):
        return Response(status_code=499)
    except Exception as error:
        return response_of(error)


async def _prepare(service: Service, body: Pooling, request: Request) -> VectorAnswer:
    """Check a body, and make the submissions of all its texts. Raises InvalidValue that names the field."""
    service.check_model(body.model)
    client, engine, config = request.state.client, service.engine, service.config
    service.limits.of(client).check(body)
    check_names(body)
    params = replace(
        pooling_params(body.pooling_type or config.pooling_type), truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    goals = objectives_of(body, request.headers, config, service.limits.of(client).tiers)
    name = f"{body.prefix}-{body.request_id or request.state.request_id}"
    salt, special = service.keys.salt(client, body.cache_salt), body.add_special_tokens is not False
    if isinstance(body, EmbeddingBody):
        check_dimensions(body.dimensions, engine.info.hidden_size)
    jobs: list[list[Submission]] = []
    for one in body.inputs:
        jobs.append([])
        texts = service.prompts.texts_of(getattr(body, one), one, special, params, engine.check_outputs)
        for text, tokens in await texts:
            check_length(len(tokens), params, engine.info.max_model_len, one)
            key = f"{name}-{sum(map(len, jobs))}"
            new = NewRequest(tuple(tokens), params, goals.slo, goals.priority, goals.tier, key, salt)
            jobs[-1].append(Submission(new, text))
    every = [job for some in jobs for job in some]
    return VectorAnswer(
        id=name,
        model=body.model or config.names[0],
        chat=False,
        jobs=every,
        tokenizer=service.tokenizer,
        top=None,
        prompt_top=False,
        client=client,
        trace=service.trace_of(request.headers, name),
        data=_data(body, [len(some) for some in jobs]),
        bare=type(body) is EmbeddingBody,
    )


def _data(body: Pooling, counts: list[int]) -> Callable[[list[Vector]], Data]:
    """Return what makes the entries of an answer from the vectors of its inputs, of which there are `counts`."""
    if isinstance(body, EmbeddingBody):
        return lambda vectors: _encoded(body, vectors)
    pairs = paired(list(range(counts[0])), list(range(counts[0], sum(counts))), ("text_1", "text_2"))

    def scores(vectors: list[Vector]) -> Data:
        found = [similarity(vectors[one], vectors[other]) for one, other in pairs]
        return [{"index": index, "object": "score", "score": score} for index, score in enumerate(found)]

    return scores


def _encoded(body: EmbeddingBody, vectors: list[Vector]) -> Data:
    kind, name = ("pooling", "data") if isinstance(body, PoolingBody) else ("embedding", "embedding")
    encoded = []
    for index, vector in enumerate(vectors):
        done = finished(vector, body.dimensions, body.normalize)
        plain = done.tolist()
        coded = base64.b64encode(done.astype("<f4").tobytes()).decode() if body.encoding_format == "base64" else plain
        encoded.append({"object": kind, "index": index, name: coded})
    return encoded
