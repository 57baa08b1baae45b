"""Inputs that cost much or break logs are refused, or processed where nothing waits for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.server.responses import items
from jaxserve.server.texts import SHORT, TextThreads, size_of

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
FORCED = {"type": "function", "function": {"name": "f"}}


def nested(depth: int) -> dict[str, Any]:
    """Return parameters of a tool that are objects in each other."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("depth", [110, 330, 450])
@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("/v1/chat/completions", lambda tool: {**CHAT, "tools": [tool], "tool_choice": "required"}),
        ("/v1/chat/completions", lambda tool: {**CHAT, "tools": [tool], "tool_choice": FORCED}),
        ("/v1/responses", lambda tool: {"input": "x", "tools": [{"type": "function", **tool["function"]}],
                                        "tool_choice": "required"}),
        ("/v1/messages", lambda tool: {**CHAT, "tools": [{"name": "f", "input_schema": tool["function"]["parameters"]}],
                                       "tool_choice": {"type": "any"}}),
    ],
)  # fmt: skip
def test_a_forced_call_of_a_deep_schema_is_refused(roomy: Any, path: str, made: Any, depth: int) -> None:
    body = made({"type": "function", "function": {"name": "f", "parameters": nested(depth)}})
    answer = roomy.http.post(path, json=body)
    assert answer.status_code == 400 and "levels" in answer.json()["error"]["message"], answer.text[:300]


@pytest.mark.parametrize("depth", [330, 450])
def test_a_deep_schema_that_is_not_enforced_is_no_failure(roomy: Any, depth: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
    assert roomy.http.post("/v1/chat/completions", json={**CHAT, "tools": [tool]}).status_code in (200, 400)


@pytest.mark.parametrize("name", ["a\r\nb", "a\nb", "a\x1b[31mb", "a\x00b", "a\x7fb", "a\u2028b", "a\u202eb"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})],
)
def test_names_that_would_break_a_log_are_refused(roomy: Any, path: str, body: dict[str, Any], name: str) -> None:
    answer = roomy.http.post(path, json={**body, "request_id": name})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "request_id"
    assert repr(name)[1:-1] in answer.json()["error"]["message"]


def test_printable_names_are_kept(roomy: Any) -> None:
    answer = roomy.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "request_id": "nächste 1/2"})
    assert answer.json()["id"] == "cmpl-nächste 1/2"


def test_ids_to_detokenize_are_bounded_before_each_is_checked(roomy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr("jaxserve.server.app.check_token", lambda token, *_: checked.append(token))
    answer = roomy.http.post("/detokenize", json={"tokens": [5] * 8001})
    assert answer.status_code == 400 and "8001" in answer.json()["error"]["message"] and not checked
    assert roomy.http.post("/detokenize", json={"tokens": [5] * 8000}).status_code == 200 and len(checked) == 8000


def test_tools_count_as_text(roomy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, inner = list[int](), TextThreads.run

    async def recorded(threads: TextThreads, work: Callable[[], Any], size: int) -> Any:
        sizes.append(size)
        return await inner(threads, work, size)

    monkeypatch.setattr(TextThreads, "run", recorded)
    long = "y" * (SHORT + 1)
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": long})}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]  # type: ignore[misc]
    for body in ({**CHAT, "tools": [tool]}, {"messages": messages}, {**CHAT, "chat_template_kwargs": {"a": [long]}}):
        roomy.http.post("/v1/chat/completions", json=body)
        assert sizes[0] > SHORT
        sizes.clear()


@pytest.mark.parametrize(
    ("given", "size"), [("abc", 3), ({"ab": ["c", 1, None]}, 7), ([], 1), (None, 1), (["x" * SHORT] * 9, 9 * SHORT + 1)]
)
def test_the_size_of_values(given: Any, size: int) -> None:
    assert size_of(given) == size


def test_the_size_of_deep_and_long_values_is_found_without_recursion_and_in_bounds() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert size_of(deep) == 100_001
    assert SHORT < size_of([[]] * 10_000_000) < 10_000_000


class Copied(str):
    """A text that counts the characters that additions copy."""

    count = 0

    def __add__(self, other: str) -> Copied:
        Copied.count += len(self) + len(other)
        return Copied(str(self) + other)

    def __radd__(self, other: str) -> Copied:
        Copied.count += len(self) + len(other)
        return Copied(other + str(self))


def test_many_reasoning_items_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "_reasoning", lambda item, where: Copied(item["content"]))
    given = [{"type": "reasoning", "content": f"{at} "} for at in range(1000)]
    said = {"role": "assistant", "content": "x"}
    made = items.messages_of_items([*given, said, given[7], {"role": "user", "content": "y"}])
    assert made[0] == {**said, "reasoning_content": "".join(str(one["content"]) for one in given)}
    assert made[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "7 "},
        {"role": "user", "content": "y"},
    ]
    assert Copied.count == 0
