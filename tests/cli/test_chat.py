"""`jaxserve chat` against an endpoint with known answers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator

import pytest
from rich.console import Console

from jaxserve.bench import client
from jaxserve.bench.client import Target
from jaxserve.cli.chat.command import Chat, measured
from jaxserve.cli.chat.conversation import Conversation, Reply
from jaxserve.cli.main import main
from jaxserve.report.printable import printable
from tests.support.bench.endpoint import Endpoint
from tests.support.pty import terminal

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m [red]markup[/red] :smile: \rover\u202ewritten"


def stream(*texts: str, **last: object) -> bytes:
    """Return the events of an answer."""
    events: list[dict[str, object]] = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    events.append({"choices": [], **last})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def talk(endpoint: Endpoint, *lines: str, tokens: int = 3) -> tuple[str, str]:
    """Type lines; return what was shown as answers, and all else."""
    out, notes = io.StringIO(), io.StringIO()
    conversation = Conversation(Target(endpoint.url, "", chat=True), sampling={"max_tokens": tokens})
    asyncio.run(conversation.meet())
    typed: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    made = Chat(conversation, Console(file=out, highlight=False), Console(file=notes, highlight=False, width=200))
    assert made.run(read) == 0
    return out.getvalue(), notes.getvalue()


def test_turns_are_one_conversation_until_it_is_cleared() -> None:
    with Endpoint().running() as endpoint:
        out, notes = talk(endpoint, "one", "two \\", "lines", "/clear", "three", "/exit", "never")
    asked = [[(one["role"], one["content"]) for one in body["messages"]] for body in endpoint.bodies]
    assert asked == [
        [("user", "one")],
        [("user", "one"), ("assistant", "xxx"), ("user", "two \nlines")],
        [("user", "three")],
    ]
    assert out == "xxx\n" * 3
    assert notes.count("TTFT") == notes.count("TPOT") == notes.count("3 tokens") == 3
    assert "promised" not in notes, "the endpoint promises nothing"


def test_objectives_are_asked_for_until_they_are_off() -> None:
    with Endpoint().running() as endpoint:
        _, notes = talk(
            endpoint, "/ttft 300ms", "/tpot 0.03", "a", "/ttft off", "b", "/tpot", "/tpot soon", "/nonsense"
        )
    asked = [{name: value for name, value in body.items() if "slo" in name} for body in endpoint.bodies]
    assert asked == [{"ttft_slo_ms": 300.0, "tpot_slo_ms": 30.0}, {"tpot_slo_ms": 30.0}]
    assert "/tpot needs a time" in notes and "'soon'" in notes and "/nonsense is no command" in notes


def test_a_refusal_or_a_cut_leaves_the_conversation_usable() -> None:
    with Endpoint(fail=2).running() as endpoint:
        out, notes = talk(endpoint, "one", "two", "three")
    assert "HTTP 503: the queue is full" in notes and out == "xxx\nxxx\n"
    assert [one["content"] for one in endpoint.bodies[-1]["messages"]] == ["one", "xxx", "three"]
    with Endpoint(cut=1).running() as endpoint:
        out, notes = talk(endpoint, "one")
    assert out == "xx" and endpoint.url in notes, "what came before the cut is shown"


@pytest.mark.parametrize(
    "odd",
    [b"data: {\n\n", b'data: {"choices": [3]}\n\n', b'data: {"choices": 3}\n\n', b'data: {"usage": {"slo": 3}}\n\n',
     b'data: {"usage": {"completion_tokens": "many"}}\n\n', b'data: {"error": {"message": "gone"}}\n\n',
     b"data: 3\n\n", b"data: " + b"[" * 100_000 + b"\n\n", 
     b'data: {"usage": {"slo": {"ttft_slo_ms": %b}}}\n\n' % (b"9" * 400),
     b'data: {"usage": {"completion_tokens": %b}}\n\n' % (b"9" * 400)],
)  # fmt: skip
def test_a_stream_that_is_none_ends_its_answer_alone(odd: bytes) -> None:
    with Endpoint(odd=odd).running() as endpoint:
        out, notes = talk(endpoint, "one", "two")
    assert out == "xxxxx\n" and notes.count("TTFT") == 1 and notes.splitlines()[1] == ""


def test_an_event_without_an_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER", 1000)
    with Endpoint(odd=b'data: {"choices": "' + b"x" * 10_000).running() as endpoint:
        out, notes = talk(endpoint, "one", "two")
    assert "longer than" in notes and out == "xxxxx\n"


def test_what_a_model_writes_is_text() -> None:
    with Endpoint(odd=stream(HOSTILE, "é", usage={"completion_tokens": 4})).running() as endpoint:
        out, _ = talk(endpoint, "hello")
    assert out == "xx" + printable(HOSTILE) + "é\n"
    assert not any(character < " " and character not in "\n\t" for character in out)
    assert "[red]markup[/red] :smile:" in out and "␛[2J" in out and "\u202e" not in out
    assert printable("a\ud800b\r\nc\td") == "a\ufffdb\nc\td"


def test_times_stand_beside_what_was_promised() -> None:
    reply = Reply(
        "text", ttft=0.4, last=1.4, pieces=5, tokens=11, promised={"ttft_slo_ms": 300.0, "tpot_slo_ms": 150.0}
    )
    text = measured(reply)
    assert text.plain == "TTFT 400 ms of 300 ms promised, late by 100 ms   TPOT 100 ms of 150 ms promised   11 tokens"
    assert [str(span.style) for span in text.spans] == ["red", "green", "dim"]
    assert measured(Reply("t", ttft=0.5, last=0.5, pieces=1)).plain == "TTFT 500 ms   1 pieces"


def test_piped_input_is_one_message_and_only_the_answer_is_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n/help lines\n"))
    with Endpoint().running() as endpoint:
        assert main(["chat", "--url", f"{endpoint.url}/v1/", "--max-tokens", "2", "--api-key", "k"]) == 0
    said = capsys.readouterr()
    assert said.out == "xx\n" and "TTFT" in said.err
    assert endpoint.bodies[0]["messages"][0]["content"] == "two\n/help lines"
    assert endpoint.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "no OpenAI-compatible server responds at http://127.0.0.1:1"),
        (["--url", "ftp://x"], "url='ftp://x' must be http://HOST[:PORT] or https://..."),
        (["--model", "other"], "model='other' must be one of toy"),
    ],
)
def test_what_does_not_fit_the_server_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Endpoint().running() as endpoint:
        assert main(["chat", "--url", endpoint.url, *flags]) == 2
    assert message in capsys.readouterr().err


def test_keys_stop_an_answer_and_leave() -> None:
    words = ("chat", "--max-tokens", "100000", "--url")
    with Endpoint(ttft=0, gap=0.02).running() as endpoint, terminal(*words, endpoint.url) as shown:
        shown.until("> ")
        shown.type("go on\n")
        shown.until("xxx")
        shown.type("\x03")
        shown.until("stopped")
        shown.until("> ")
        shown.interrupt("Ctrl-D or /exit leaves")
        shown.until("> ")
        shown.type("\x04")
        assert shown.status() == 0
