"""Disconnecting clients release the resources of their requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.support.server.live import connect
from tests.support.timing import until

LONG = {"prompt": "def main(", "max_tokens": 200, "ignore_eos": True}


def cut_off(live: Any, leave: Callable[[], None], requests: int = 1) -> None:
    """Disconnect until `requests` requests were aborted; repeat if an answer was complete before the client left."""
    for _ in range(10):
        before = live.engine.stats().finished.get("abort", 0)
        leave()
        live.quiet()
        if live.engine.stats().finished.get("abort", 0) == before + requests:
            return
    raise AssertionError(f"no attempt of ten aborted {requests} requests: {live.engine.stats().finished}")


@pytest.mark.parametrize("more", [{}, {"tpot_slo_ms": 400, "pace_tokens": True}], ids=["plain", "paced"])
def test_leaving_a_stream_frees_the_request(live, more):
    def leave() -> None:
        with live.http.stream("POST", "/v1/completions", json={**LONG, **more, "stream": True}) as response:
            assert next(response.iter_lines()).startswith("data: {")

    cut_off(live, leave)
    until(lambda: not live.engine.stats().kv_usage)  # pages are freed after the running step


def test_leaving_a_whole_answer_frees_the_request(live):
    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/completions", json={**LONG, "n": 3}, timeout=httpx.Timeout(5, read=0.05))

    cut_off(live, leave, requests=3)
    assert live.http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200


def test_many_leave_and_one_stays(live):
    async def leave(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model="jaxserve-demo", prompt="x", max_tokens=200, stream=True)
        async for _ in stream:
            await stream.close()
            return

    async def main() -> int:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            stay = client.completions.create(
                model="jaxserve-demo", prompt="y", max_tokens=30, extra_body={"ignore_eos": True}
            )
            made, *_ = await asyncio.gather(stay, *(leave(client) for _ in range(6)))
            return made.usage.completion_tokens

    assert asyncio.run(main()) == 30
    live.quiet()
    live.engine.check()


def test_leaving_mid_body_is_no_error(fake, caplog):
    """The client announces a body, sends half of it and closes the connection."""
    live = fake(config={"log_level": "debug"})
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        with connect(live.url, head.encode(), b'{"prompt": '):
            time.sleep(0.1)
    time.sleep(0.2)
    assert live.http.get("/health").status_code == 200  # the server's loop has seen the connection close
    assert "Traceback" not in caplog.text and "internal error" not in caplog.text, caplog.text


def test_a_stop_string_frees_the_request(live):
    before = live.engine.stats().finished.get("stop", 0)
    made = live.http.post("/v1/completions", json={**LONG, "stop": ["a", "e", "i", "\n", " ", "t", "s", "0"]}).json()
    assert made["choices"][0]["finish_reason"] == "stop" and made["usage"]["completion_tokens"] < 200
    until(lambda: live.engine.stats().finished.get("stop", 0) != before)
    live.quiet()
