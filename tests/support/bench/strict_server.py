"""A FastAPI server as others write them: pydantic refuses unknown fields, and prompts must be texts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _StreamOptions(_Strict):
    include_usage: bool = False


class _Body(_Strict):
    model: str
    stream: Literal[True]
    stream_options: _StreamOptions | None = None
    temperature: float = 1.0


class _Completion(_Body):
    prompt: str
    max_tokens: int


class _Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: str


class _Chat(_Body):
    messages: list[_Message]
    max_completion_tokens: int


UNSET: Any = object()


@dataclass
class StrictServer:
    """The server, and the bodies that it accepted.

    completions: it has /v1/completions. models: it lists its model. listed: what it answers instead. thinks: chat
    answers begin with two chunks of thinking. refuse: number of the request, from 1, that gets a 429.
    """

    completions: bool = True
    models: bool = True
    listed: Any = UNSET
    thinks: bool = False
    refuse: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> Any:
            listed = {"object": "list", "data": [{"id": "strict", "owned_by": "strict"}] if self.models else []}
            return listed if self.listed is UNSET else self.listed

        @app.post("/v1/chat/completions", response_model=None)
        def chat(body: _Chat) -> Any:
            thoughts = 2 if self.thinks else 0
            deltas = [{"role": "assistant", "content": ""}]
            deltas += [{"reasoning_content": "hm "}] * thoughts
            deltas += [{"content": f"w{n} "} for n in range(body.max_completion_tokens - thoughts)]
            return self._answer(body, [{"delta": delta} for delta in deltas])

        if self.completions:

            @app.post("/v1/completions", response_model=None)
            def complete(body: _Completion) -> Any:
                return self._answer(body, [{"text": f"w{n} "} for n in range(body.max_tokens)])

        return app

    def _answer(self, body: _Body, choices: list[dict[str, Any]]) -> Any:
        self.bodies.append(body.model_dump(exclude_none=True))
        if len(self.bodies) == self.refuse:
            return JSONResponse({"error": {"message": "too many requests of you", "type": "rate_limit"}}, 429)
        common = {"id": "r", "object": "x", "created": 0, "model": body.model}

        def events() -> Iterator[str]:
            for choice in choices:
                yield f"data: {json.dumps({**common, 'choices': [{'index': 0, 'finish_reason': None, **choice}]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @contextmanager
    def running(self) -> Iterator[StrictServer]:
        # log_config: configuring logging closes all handlers, and that of absl closes the stream that pytest captures.
        server = uvicorn.Server(uvicorn.Config(self.app(), port=0, log_config=None))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            for _ in range(1000):
                if server.started:
                    break
                time.sleep(0.01)
            self.port = server.servers[0].sockets[0].getsockname()[1]
            yield self
        finally:
            server.should_exit = True
            thread.join()
