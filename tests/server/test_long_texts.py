"""Long texts are refused before tokenization if they cannot fit, and those that fit do not delay short ones."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import jaxserve.demo
from jaxserve.server.texts import SHORT, TextThreads
from jaxserve.tokenizer import Tokenizer
from tests.support.timing import until


def test_texts_longer_than_the_context_are_never_tokenized(fake, monkeypatch):
    live = fake(max_model_len=64)
    encoded = []
    encode = live.service.tokenizer.encode

    def recorded(text, *more):
        encoded.append(text)
        return encode(text, *more)

    monkeypatch.setattr(live.service.tokenizer, "encode", recorded)
    most = 64 * live.service.tokenizer.longest_piece
    long = "x" * (most + 1)
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": ["x", long]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 65}, "messages"),
        ("/tokenize", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 64}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 1025}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 600, "n": 2}, "n"),
        ("/v1/completions", {"prompt": [[1]] * 2000}, "n"),
    ):
        answer = live.http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, (path, answer.text[:300])
        assert len(answer.text) < 1000
    assert set(encoded) <= {"x"}
    assert live.http.post("/tokenize", json={"prompt": "x" * most}).status_code == 200


def test_a_short_prompt_overtakes_long_ones(fake, monkeypatch):
    """Long texts occupy all threads but one, whatever the number of threads."""
    live = fake(max_model_len=4096)
    free, encode = threading.Event(), live.service.tokenizer.encode

    def slow(text, *more):
        if len(text) > SHORT:
            free.wait(120)
        return encode(text, *more)

    monkeypatch.setattr(live.service.tokenizer, "encode", slow)
    long = {"prompt": "x" * (SHORT + 1)}
    with ThreadPoolExecutor(10) as asking:
        for _ in range(10):
            asking.submit(live.http.post, "/tokenize", json=long)
        try:
            until(lambda: live.service.prompts.texts.waiting >= 5)
            assert live.http.post("/v1/completions", json={"prompt": "def", "max_tokens": 1}).status_code == 200
            assert live.service.prompts.texts.waiting
        finally:
            free.set()


def test_texts_of_disconnected_clients_are_dropped(fake, monkeypatch):
    live = fake(max_model_len=4096)
    free, begun, encode = threading.Event(), [], live.service.tokenizer.encode

    def slow(text, *more):
        begun.append(text)
        free.wait(30)
        return encode(text, *more)

    monkeypatch.setattr(live.service.tokenizer, "encode", slow)
    for path in ("/v1/completions", "/tokenize"):
        for _ in range(6):
            with pytest.raises(httpx.ReadTimeout):
                body, patience = {"prompt": "x" * 50_000}, httpx.Timeout(5, read=0.05)
                httpx.post(live.url + path, json=body, timeout=patience, verify=False)
    until(lambda: not live.service.prompts.texts.waiting, lambda: "texts of disconnected clients are still waiting")
    running = len(begun)
    free.set()
    assert live.http.post("/v1/completions", json={"prompt": "y", "max_tokens": 1}).status_code == 200
    assert begun[running:] == ["y"]


def test_shortest_first_without_starvation():
    async def main() -> list[int]:
        threads, order, free = TextThreads(2), [], threading.Event()
        holds = [asyncio.ensure_future(threads.run(free.wait, 1)) for _ in range(2)]
        await asyncio.sleep(0.1)
        sizes = (30_000, 10, 3_000_000, 200)
        work = [asyncio.ensure_future(threads.run(lambda size=size: order.append(size), size)) for size in sizes]
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*holds, *work)
        threads.close()
        return order

    order = asyncio.run(main())
    assert [size for size in order if size <= SHORT] == [10, 200, 30_000] and 3_000_000 in order


def test_concurrent_encoding_gives_equal_ids(tokenizer):
    texts = [f"def f_{number}(a, b):\n    return {'é🎉 ' * number}" for number in range(40)]
    alone = [tokenizer._hf.encode(text) for text in texts]
    with ThreadPoolExecutor(len(texts)) as threads:
        for _ in range(20):
            assert list(threads.map(tokenizer.encode, texts)) == alone
    assert tokenizer.longest_piece == max(map(len, tokenizer._hf.get_vocab()))


def test_a_text_longer_than_the_tokenizers_limit_logs_no_warning(tokenizer, monkeypatch):
    """The server reports its own limit to the client, and a log line of transformers about another one misleads."""
    monkeypatch.setattr(Tokenizer, "_reentrant", False)  # encodes with transformers' own code
    own, said = Tokenizer.load(jaxserve.demo.model_path()), []
    monkeypatch.setattr(own._hf, "model_max_length", 4)
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", lambda *what: said.append(what))
    assert own.encode("def main(a, b, c):") == tokenizer._hf.encode("def main(a, b, c):")
    assert said == []
