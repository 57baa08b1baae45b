"""Texts of models with calls, as vLLM's suites of parsers have them, in our words: whole and streamed.

`DIFFERENT` has those that a peer reads in another way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.server.message import Message
from jaxserve.tools.definitions import tools_of
from jaxserve.tools.families import TOOL_PARSERS, Parsers
from jaxserve.tools.json_calls import BEGIN, END, SEPARATOR
from tests.support.server.peers import Differs

Call = tuple[str, dict[str, Any]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TOOLS = tools_of(
    [
        tool("add", a={"type": "number"}, b={"type": "number"}),
        tool("ping"),
        tool("note", text={"type": "string"}, path={"type": "string"}),
        tool("any", s={"type": "string"}, i={"type": "integer"}, f={"type": "number"}, y={"type": "boolean"},
             n={"type": ["integer", "null"]}, z={"type": ["string", "null"]}, l={"type": "array"},
             o={"type": "object"}),
        tool("maybe", s=NULLABLE, i={"anyOf": [{"type": "integer"}, {"type": "null"}]},
             one={"oneOf": [{"type": "integer"}, {"type": "string"}]}, all={"allOf": [{"type": "string"}]},
             e={"enum": ["1", "2"]}, c={"const": "3"}),
        tool("odd", a={"anyOf": [{"type": [{}, 1]}, 7, {"type": {}}], "allOf": {}, "enum": 5}),
    ]
)  # fmt: skip


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{dumped({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def qwen(calls: list[Call]) -> str:
    each = [
        f"<function={n}>\n"
        + "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in a.items())
        + "</function>"
        for n, a in calls
    ]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)


def minimax(calls: list[Call]) -> str:
    each = [
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in a.items())
        + "</invoke>\n"
        for n, a in calls
    ]
    return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


def deepseek(calls: list[Call]) -> str:
    each = [f"{BEGIN}function{SEPARATOR}{n}\n```json\n{dumped(a)}\n```{END}" for n, a in calls]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumped(a)}<|call|>" for n, a in calls
    )


def listed(calls: list[Call]) -> str:
    return dumped([{"name": n, "arguments": a} for n, a in calls])


def lines(calls: list[Call]) -> str:
    return "\n".join(f"{n}({', '.join(f'{key}={dumped(value)}' for key, value in a.items())})" for n, a in calls)


def glm(calls: list[Call]) -> str:
    pairs = [
        (n, "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in a.items()))
        for n, a in calls
    ]
    return "\n".join(f"<tool_call>{n}\n{arguments}</tool_call>" for n, arguments in pairs)


WRITE: dict[str, tuple[str, Callable[[list[Call]], str]]] = {
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", qwen),
    "minimax_m2": ("minimax_m2", minimax),
    "deepseek_v3": ("deepseek_v3", deepseek),
    "deepseek_v31": (
        "deepseek_v3",
        lambda calls: (
            "<｜tool▁calls▁begin｜>"
            + "".join(f"{BEGIN}{n}{SEPARATOR}{dumped(a)}{END}" for n, a in calls)
            + "<｜tool▁calls▁end｜>"
        ),
    ),
    "mistral": ("mistral", lambda calls: "[TOOL_CALLS] " + dumped([{"name": n, "arguments": a} for n, a in calls])),
    "mistral_v11": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{n}{dumped(a)}" for n, a in calls)),
    "llama3_json": (
        "llama3_json",
        lambda calls: "<|python_tag|>" + "; ".join(dumped({"name": n, "parameters": a}) for n, a in calls),
    ),
    "pythonic": (
        "pythonic",
        lambda calls: (
            "[" + ", ".join(f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls) + "]"
        ),
    ),
    "gpt_oss": ("gpt_oss", harmony),
    "granite": ("granite", lambda calls: "<|tool_call|>" + listed(calls)),
    "granite_tag": ("granite", lambda calls: f"<tool_call>{listed(calls)}"),
    "phi4_mini": ("phi4_mini", lambda calls: f"<|tool_call|>{listed(calls)}<|/tool_call|>"),
    "phi4_mini_json": ("phi4_mini_json", lambda calls: "functools" + listed(calls)),
    "olmo3": ("olmo3", lambda calls: f"<function_calls>{lines(calls)}</function_calls>"),
    "glm4": ("glm4", lambda calls: "\n".join(f"{n}\n{dumped(a)}" for n, a in calls)),
    "glm45": ("glm45", glm),
}
CALLS: dict[str, list[Call]] = {
    "one": [("add", {"a": 3.5, "b": 4})],
    "no arguments": [("ping", {})],
    "two": [("add", {"a": 1, "b": 2}), ("ping", {})],
    "same twice": [("note", {"text": "x"}), ("note", {"text": "y"})],
    "types": [("any", {"s": "a b", "i": -3, "f": 0.5, "y": True, "n": None, "l": [1, "2"], "o": {"k": {"m": [None]}}})],
    "empty values": [("any", {"l": [], "o": {}})],
    "escapes": [("note", {"text": 'He said "hi" \\ it\'s\ta tab', "path": "C:\\new\\table"})],
    "brackets": [("note", {"text": "} ] ) ; { [ ( </ > }}"})],
    "unicode": [("note", {"text": "naïve 東京 🎉"})],
    "JSON as text": [("note", {"text": '{"name": "add", "arguments": {}}'})],
    "lines": [("note", {"text": "first\n\n  second\nthird"})],
    "long": [("note", {"text": "word " * 500})],
    "name in arguments": [("any", {"o": {"name": "add", "arguments": {"a": 1}}})],
}
ALONE = ("llama3_json", "pythonic", "glm4")  # a call is the whole output


def answered(family: str, text: str, size: int | None) -> tuple[str, list[Call]]:
    """Return the content and the calls of a text that arrives whole, or in pieces."""
    message = Message(Parsers(family, None).start(TOOLS, ""))
    if size is None:
        whole = message.whole(text)
        calls = [one["function"] for one in whole.get("tool_calls", ())]
        return whole["content"] or "", [(one["name"], json.loads(one["arguments"])) for one in calls]
    deltas = [one for at in range(0, len(text), size) for one in message.add(text[at : at + size])] + message.finish()
    names, parts = list[str](), list[str]()
    for part in (part for one in deltas for part in one.get("tool_calls", ())):
        if "name" in part["function"]:
            names.append(part["function"]["name"])
            parts.append("")
        parts[part["index"]] += part["function"]["arguments"]
    content = "".join(one.get("content", "") for one in deltas)
    return content, list(zip(names, map(json.loads, parts), strict=True))


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("form", WRITE)
def test_calls_are_read(form: str, case: str) -> None:
    family, write = WRITE[form]
    for size in (None, 1, 5):
        assert answered(family, write(CALLS[case]), size) == ("", CALLS[case])


@pytest.mark.parametrize("form", [form for form in WRITE if form not in ALONE and form != "gpt_oss"])
def test_text_before_a_call_is_content(form: str) -> None:
    family, write = WRITE[form]
    for size in (None, 1, 5):
        assert answered(family, "I look it up.\n" + write(CALLS["two"]), size) == ("I look it up.", CALLS["two"])


@pytest.mark.parametrize("text", ["", "Hello there", "1 < 2 and [3] {4}", "a `tool_call`", "<tool", "né 🎉\n"])
@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_text_without_a_call_is_content(family: str, text: str) -> None:
    for size in (None, 1, 5):
        assert answered(family, text, size) == (text, [])


# (family, text, content, calls)
OTHERS: list[tuple[str, str, str, list[Call]]] = [
    ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "add"}]', "", [("add", {"a": 1})]),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"name": "Jo"}, "name": "add"}]', "", [("add", {"name": "Jo"})]),
    ("qwen3_coder", "<tool_call><function=odd><parameter=a>1</parameter></function></tool_call>", "",
     [("odd", {"a": 1})]),
    ("mistral", "[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}", "", [("ping", {})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
    ("hermes", '<tool_call>\n\n{"name": "ping", "arguments": {}}\n\n', "", [("ping", {})]),
    ("qwen3_coder", "<tool_call><function=ping></function></tool_call>", "", [("ping", {})]),
    ("qwen3_coder",
     "<tool_call><function=maybe><parameter=s>42</parameter><parameter=i>42</parameter></function></tool_call>", "",
     [("maybe", {"s": "42", "i": 42})]),
    ("minimax_m2", '<minimax:tool_call><invoke name="maybe"><parameter name="s">null</parameter>'
     '<parameter name="i">null</parameter></invoke></minimax:tool_call>', "", [("maybe", {"s": None, "i": None})]),
    ("qwen3_coder",
     "<tool_call><function=maybe><parameter=all>7</parameter><parameter=e>1</parameter><parameter=c>3</parameter>"
     "<parameter=one>5</parameter></function></tool_call>", "",
     [("maybe", {"all": "7", "e": "1", "c": "3", "one": 5})]),
    ("qwen3_coder",
     "<tool_call><function=note><parameter=text>def f():\n    </function>\n</parameter></function></tool_call>", "",
     [("note", {"text": "def f():\n    </function>"})]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}\n', "", [("add", {"a": 1})]),
    ("llama3_json", '{"name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
    ("llama3_json", '{"type": "function", "name": "ping", "parameters": {}}', "", [("ping", {})]),
    ("pythonic", "[note(text='Martha\\'s \"cool\" place')]", "", [("note", {"text": 'Martha\'s "cool" place'})]),
    ("pythonic", "<|python_tag|>[ping()]", "", [("ping", {})]),
    ("granite", '<|tool_call|>[{"arguments": {"a": 1}, "name": "add"}]', "", [("add", {"a": 1})]),
    ("granite", '<tool_call>[{"name": "ping", "arguments": {}}]</tool_call>', "", [("ping", {})]),
    ("granite", "<|tool_call|> none", "<|tool_call|> none", []),
    ("phi4_mini", '<|tool_call|>{"name": "add", "arguments": {"a": 1}}<|/tool_call|>', "", [("add", {"a": 1})]),
    ("phi4_mini_json", "use functools.cache", "use functools.cache", []),
    ("phi4_mini_json", 'functools[{"arguments": {"a": 1}, "name": "add"}]', "", [("add", {"a": 1})]),
    ("olmo3", "<function_calls>add(a=1)\nx = 3</function_calls>", "<function_calls>add(a=1)\nx = 3</function_calls>",
     []),
    ("olmo3", "<function_calls>any(y=true, n=null, f=True)</function_calls> ok", "ok",
     [("any", {"y": True, "n": None, "f": True})]),
    ("glm4", 'other\n{"a": 1}', 'other\n{"a": 1}', []),
    ("glm4", "\nping\nis a tool", "\nping\nis a tool", []),
    ("glm45", "<tool_call>ping</tool_call>", "", [("ping", {})]),
    ("glm45",
     "<tool_call>maybe<arg_key>s</arg_key><arg_value>5</arg_value><arg_key>i</arg_key>\n<arg_value>5</arg_value>"
     "</tool_call>", "", [("maybe", {"s": "5", "i": 5})]),
    ("glm45", "<tool_call>add<arg_key>a</arg_key></tool_call>", "<tool_call>add<arg_key>a</arg_key></tool_call>", []),
    ("pythonic", "[note(text='x 'y' 'z)]", "[note(text='x 'y' 'z)]", []),
    # an end within a text, texts around, a call that is not ended, ids of calls, numbers that are texts
    ("hermes", '<tool_call>\n{"name": "note", "arguments": {"text": "</tool_call> \\" }"}}\n</tool_call> done', "done",
     [("note", {"text": '</tool_call> " }'})]),
    ("mistral", 'Now [TOOL_CALLS] [{"name": "ping", "arguments": {}, "id": "abcdefghi"}]', "Now", [("ping", {})]),
    ("qwen3_coder", "<tool_call><function=any><parameter=z>75001</parameter></function></tool_call>", "",
     [("any", {"z": "75001"})]),
    ("gpt_oss", "<|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{}", "", [("ping", {})]),
    ("gpt_oss", "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
     "<|end|><|start|>assistant<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}<|call|>",
     "I look.", [("ping", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), OTHERS)
def test_what_else_models_write(family: str, text: str, content: str, calls: list[Call]) -> None:
    for size in (None, 1, 5):
        assert answered(family, text, size) == (content, calls)


# Texts that vLLM's parsers read in another way.
DIFFERENT: list[tuple[str, str, str, list[Call], Differs]] = [
    ("mistral", '[TOOL_CALLS] [{"name": "ping", "arguments": {}}]\nmore', "more", [("ping", {})],
     Differs("vLLM", "Mistral: drops the text after a list of calls", "it stays content: no text is lost")),
    ("mistral", "[TOOL_CALLS] not JSON at all", "[TOOL_CALLS] not JSON at all", [],
     Differs("vLLM", "Mistral: drops a marker that no call follows", "it stays content, as it was written")),
    ("pythonic", "[add(a=1e999), ping()]", "[add(a=1e999), ping()]", [],
     Differs("vLLM", "pythonic: keeps the calls of a list that it can read", "a list is all calls, or it is content")),
    ("qwen3_coder", "<function=other></function>", "<function=other></function>", [],
     Differs("vLLM", "Qwen3-Coder: a call without `<tool_call>` may have any name",
             "the name must be a tool's, so that a text about calls stays a text")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls", "differs"), DIFFERENT)
def test_texts_that_a_peer_reads_in_another_way(
    family: str, text: str, content: str, calls: list[Call], differs: Differs
) -> None:
    for size in (None, 1, 5):
        assert answered(family, text, size) == (content, calls), differs
