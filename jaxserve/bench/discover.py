"""What a server is: its model, its request format, and token ids of its vocabulary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp

from jaxserve.bench import backends, texts
from jaxserve.bench.client import Target, json_of
from jaxserve.errors import InvalidValue

FALLBACK = range(32, 256)  # token ids if the server has no /tokenize
ABSENT = (404, 405, 501)  # statuses of a path that a server does not have

STARTING = "starting"  # code of the error with which jaxserve answers /health until its model is ready
POLL = 0.5  # seconds between two looks


async def wait_until_ready(target: Target, patience: float) -> None:
    """Wait while the server says that it starts; return at once if it says anything else, or cannot be reached.

    patience: seconds; 0: do not look. Raises InvalidValue if the server still starts then.
    """
    end, said = time.monotonic() + patience, False
    async with _open(target) as http:
        while patience > 0 and (step := await _starting(http, target)) is not None:
            if time.monotonic() >= end:
                raise InvalidValue(
                    f"{target.base_url} is not ready after {patience:g} s (--ready-check-timeout-sec): {step}",
                    "ready_check_timeout_sec",
                )
            if not said:
                print(f"{target.base_url}: {step}; waiting", flush=True)
            said = True
            await asyncio.sleep(POLL)


async def _starting(http: aiohttp.ClientSession, target: Target) -> str | None:
    """Return what a server that starts says about that; None for any other."""
    with suppress(aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
        async with http.get(target.base_url + "/health") as answer:
            if answer.status == 503:
                error = (await json_of(answer))["error"]
                return str(error["message"]) if error["code"] == STARTING else None
    return None


async def choose_backend(target: Target, chat: bool = False) -> str:
    """Ask the server which backend of `BACKENDS` it is; `chat` for conversations.

    Raises InvalidValue if it cannot be reached.
    """
    async with _open(target) as http:
        with reaching(target):
            listed = await models(http, target)
            own = next((entry for entry in listed if entry.get("id") == target.model), listed[0] if listed else {})
            # An empty body is refused by every server that has the path, and costs it nothing.
            async with http.post(target.base_url + "/v1/completions", json={}) as answer:
                completions = answer.status not in ABSENT
    return backends.choose(own, completions, chat)


async def discover(target: Target, vocabulary: Sequence[int]) -> tuple[Target, Sequence[int]]:
    """Ask the server for the model's name and for token ids of its vocabulary, if they are not given.

    Raises InvalidValue if the server cannot be reached.
    """
    async with _open(target) as http:
        with reaching(target):
            if not target.model:
                listed = await models(http, target)
                if not listed or "id" not in listed[0]:
                    raise InvalidValue(f"{target.base_url}/v1/models lists no model: set --model", "model")
                target = replace(target, model=str(listed[0]["id"]))
            if not vocabulary:
                body = {"model": target.model, "prompt": texts.SAMPLE, "add_special_tokens": False}
                async with http.post(target.base_url + "/tokenize", json=body) as answer:
                    said = await json_of(answer) if answer.status == 200 else None
                tokens = said.get("tokens") if isinstance(said, dict) else None
                usable = isinstance(tokens, list) and all(type(token) is int for token in tokens)
                vocabulary = sorted(set(tokens)) if tokens and usable else FALLBACK
    return target, vocabulary


def _open(target: Target) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {target.api_key}", **target.headers}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30.0))


async def models(http: aiohttp.ClientSession, target: Target) -> list[dict[str, Any]]:
    """Return the entries of /v1/models; none if the server has no such path but the model's name is given."""
    async with http.get(target.base_url + "/v1/models") as answer:
        if answer.status in ABSENT and target.model:
            return []
        answer.raise_for_status()
        body = await json_of(answer)
    listed = body.get("data") if isinstance(body, dict) else body  # some servers answer the bare list
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


@contextmanager
def reaching(target: Target) -> Iterator[None]:
    """Raise InvalidValue for a server that does not list its models."""
    try:
        yield
    except InvalidValue:
        raise
    except aiohttp.ClientResponseError as error:
        hint = ": set --api-key" if error.status in (401, 403) else ""
        raise InvalidValue(f"{target.base_url}/v1/models answers HTTP {error.status}{hint}") from error
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise InvalidValue(f"no OpenAI-compatible server responds at {target.base_url} ({problem})") from error
