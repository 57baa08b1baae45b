"""The examples run on the session's engine, which differs from theirs only in size."""

from __future__ import annotations

import asyncio
import runpy
from typing import Any

import pytest

import jaxserve
from jaxserve.config import ServeConfig


@pytest.fixture
def shared(engine: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a patched LLM constructor that uses the shared engine and does not close it."""
    for kind in (jaxserve.LLM, jaxserve.AsyncLLM):
        monkeypatch.setattr(kind, "close", lambda self: None)
    return {"config": ServeConfig(), "engine": engine, "tokenizer_object": tokenizer}


def test_offline(repo, shared, capsys):
    runpy.run_path(str(repo / "examples" / "offline.py"))["main"](jaxserve.LLM(**shared))
    said = capsys.readouterr().out
    assert said.count("first token after") == 3 and "class Stack:" in said


def test_async_stream(repo, shared, capsys):
    asyncio.run(runpy.run_path(str(repo / "examples" / "async_stream.py"))["main"](jaxserve.AsyncLLM(**shared)))
    said = capsys.readouterr().out
    assert "[urgent]" in said and "[relaxed]" in said


def test_client(repo, live, capsys):
    runpy.run_path(str(repo / "examples" / "client.py"))["main"](live.url)
    assert " tokens" in capsys.readouterr().out
