"""What agents do with errors: they come again, ask for less, or say what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from jaxserve.errors import ContextOverflow, QueueFull
from jaxserve.server import failures
from jaxserve.server.guard import Guard
from jaxserve.tokenizer import Tokenizer
from tests.support.agents.scripted import Treasure, serving
from tests.support.agents.started import answer
from tests.support.server.live import Live


@pytest.fixture
def overflows(monkeypatch: pytest.MonkeyPatch) -> list[ContextOverflow]:
    """The refusals of contexts that are too short."""
    found, inner = list[ContextOverflow](), failures.refusal

    def refusal(error: Exception) -> failures.Refused:
        if isinstance(error, ContextOverflow):
            found.append(error)
        return inner(error)

    monkeypatch.setattr(failures, "refusal", refusal)
    return found


def test_claude_code_asks_for_less(
    installed: Path, tokenizer: Tokenizer, tmp_path: Path, overflows: list[ContextOverflow]
) -> None:
    """Its first prompt fits, but not with the 32,000 tokens that it asks for."""
    treasure = Treasure(tmp_path / "work")
    live = serving(tokenizer, treasure, context=45_000)
    said = answer("Claude Code", installed, tmp_path, treasure, live)
    assert treasure.value in said, said[-4000:]
    asked = [request.params.max_tokens or 0 for request in live.engine.submitted]
    assert overflows and {error.output for error in overflows} == {32_000}
    assert asked and all(most < error.context - error.prompt for most in asked for error in overflows[:1]), asked


def test_opencode_compacts(
    installed: Path, tokenizer: Tokenizer, tmp_path: Path, overflows: list[ContextOverflow]
) -> None:
    """The first file does not fit the context: opencode has what is before it summed up, and goes on with that."""
    treasure = Treasure(tmp_path / "work", padding="A line of the file.\n" * 2000)
    live = serving(tokenizer, treasure, context=30_000)
    said = answer("opencode", installed, tmp_path, treasure, live)
    assert treasure.value in said, said[-4000:]
    assert overflows and "head" in treasure.turns[1]
    later = live.service.tokenizer.decode(live.engine.submitted[-1].prompt)
    assert "compacted" in later and "A line of the file" not in later


CODERS = ["Claude Code", "Codex", "opencode", "qwen-code"]
LOADS: list[Exception] = [
    QueueFull("1 request waits", 1.0),  # 529 for Claude Code, 503 for others
    failures.Refused(429, "too many tokens", code="token_rate", retry_after=1.0),
    failures.Refused(503, "the server is shutting down", code="shutting_down", retry_after=1.0),
]


def refuse_first(live: Live, load: Exception) -> list[Exception]:
    """Let a server refuse its first request; return a list that has `load` afterwards."""
    submit, told = live.engine.submit, list[Exception]()

    def submitted(*given: Any) -> int:
        if not told:
            told.append(load)
            raise load
        return int(submit(*given))

    live.engine.submit = submitted
    return told


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("agent", CODERS)
def test_agents_come_again(agent: str, load: Exception, installed: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A load that passes does not end their task."""
    treasure = Treasure(tmp_path / "work")
    live = serving(tokenizer, treasure)
    told = refuse_first(live, load)
    said = answer(agent, installed, tmp_path, treasure, live)
    assert told and treasure.value in said, said[-4000:]


@pytest.mark.parametrize(("load", "leaves"), [(LOADS[0], False), (LOADS[2], True)], ids=str)
def test_claude_code_leaves_for_its_fallback_at_503_only(
    load: Exception, leaves: bool, installed: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A full queue must not send it to another model: it passes."""
    treasure = Treasure(tmp_path / "work")
    live = serving(tokenizer, treasure, served_model_name=("jaxserve-demo", "other"))
    told, asked, check = refuse_first(live, load), set[str | None](), live.service.check_model
    live.service.check_model = lambda name: (asked.add(name), check(name))[1]  # type: ignore[method-assign]
    said = answer("Claude Code", installed, tmp_path, treasure, live, "--fallback-model", "other")
    assert told and treasure.value in said, said[-4000:]
    assert ("other" in asked) is leaves


# status: (what the server is set to, words of its message, words of Claude Code)
FAULTS: dict[int, tuple[dict[str, Any], str, str]] = {
    401: ({"api_key": ("right",)}, "a wrong API key", "a wrong API key"),
    404: ({"served_model_name": ("other",)}, "is not served here", "There's an issue with the selected model"),
    413: ({"max_body_size": 1000}, "the body is larger than 1000 bytes", "Request too large"),
    415: ({}, "send the body without compression", "send the body without compression"),
}


def compress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say of each body that it is compressed, as a proxy before the server may: no agent does."""
    inner = Guard.__call__

    async def compressed(self: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "POST":
            scope["headers"] = [*scope["headers"], (b"content-encoding", b"br")]
        await inner(self, scope, receive, send)

    monkeypatch.setattr(Guard, "__call__", compressed)


@pytest.mark.parametrize("status", FAULTS)
@pytest.mark.parametrize("agent", CODERS)
def test_agents_say_what_is_wrong(
    agent: str, status: int, installed: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails again is sent a few times at most: Codex sends it five times more, whatever the status."""
    settings, words, of_claude = FAULTS[status]
    told, inner = list[int](), failures.refusal

    def refusal(error: Exception) -> failures.Refused:
        refused = inner(error)
        told.append(refused.status)
        return refused

    monkeypatch.setattr(failures, "refusal", refusal)
    treasure = Treasure(tmp_path / "work")
    live = serving(tokenizer, treasure, **settings)
    if status == 415:
        compress(monkeypatch)
    said = answer(agent, installed, tmp_path, treasure, live)
    assert (of_claude if agent == "Claude Code" else words) in said, said[-4000:]
    assert 1 <= told.count(status) <= 6 and not live.engine.submitted, told
