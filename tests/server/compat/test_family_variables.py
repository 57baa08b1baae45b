"""Thinking, documents and controls of Granite 3 and SmolLM3, whose templates have variables of their own.

The templates are in our words, with the markers, the variables and the order of cases of the published ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.support.server.live import Live

Writer = Callable[[str, str], Live]
NUMBERED = (
    "{% for d in documents or () %}<|start_of_role|>document {{ d['doc_id'] }}<|end_of_role|>"
    "{{ d['text'] }}{% endfor %}"
)
TOGETHER = (
    "{% if documents %}<|start_of_role|>documents<|end_of_role|>{% for d in documents %}{{ d['text'] }} "
    "{% endfor %}{% endif %}"
)


def granite(thinking: str, documents: str, cite: str) -> str:
    """Return a template: instructions of the first case that fits, unless the conversation has its own."""
    return (
        "{% if messages[0]['role'] == 'system' %}{% set about = messages[0]['content'] %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% if tools and documents %}{% set about = 'Tools, documents.' %}"
        "{% elif tools %}{% set about = 'Tools.' %}{% elif documents %}{% set about = 'Documents.' %}" + thinking +
        "{% else %}{% set about = 'Help.' %}{% endif %}{% if 'citations' in controls and documents %}"
        "{% set about = about + ' Cite by " + cite + "' %}{% endif %}{% endif %}"
        "<|start_of_role|>system<|end_of_role|>{{ about }}<|end_of_text|>\n"
        "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}{% endif %}" + documents +
        "{% for m in rest %}<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ m['content'] }}<|end_of_text|>\n"
        "{% if loop.last and add_generation_prompt %}<|start_of_role|>assistant"
        "{% if controls %} {{ controls | tojson }}{% endif %}<|end_of_role|>{% endif %}{% endfor %}"
    )  # fmt: skip


IN_WORDS = (
    "{% elif thinking %}{% set about = \"Write thoughts after 'Here is my thought process:' and the rest after "
    "'Here is my response:' please.\" %}"
)
IN_TAGS = (
    "{% elif thinking %}{% set about = 'Write thoughts between <think></think> and the rest between "
    "<response></response> please.' %}"
)
TEMPLATES = {
    "3.1": granite("", TOGETHER, "<co>"),
    "3.2": granite(IN_WORDS, TOGETHER, "<co>"),
    "3.3": granite(IN_TAGS, NUMBERED, "<|start_of_cite|>"),
    "smollm3": (
        "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "{% set mode = '/think' if enable_thinking else '/no_think' %}{% set own = '' %}"
        "{% if messages[0].role == 'system' %}{% set own = messages[0].content %}"
        "{% if '/no_think' in own %}{% set mode = '/no_think' %}"
        "{% elif '/think' in own %}{% set mode = '/think' %}{% endif %}"
        "{% set own = own.replace('/no_think', '').replace('/think', '').rstrip() %}{% endif %}<|im_start|>system\n"
        "{% if '/system_override' in own %}{{ own.replace('/system_override', '') }}{% else %}Mode: {{ mode }}\n"
        "Instructions: {{ own or 'You are SmolLM.' }}\n{% if tools %}{% set xml_tools = tools %}{% endif %}"
        "{% if xml_tools %}{% for t in xml_tools[:] %}{{ t | string }}{% endfor %} <tool_call></tool_call>{% endif %}"
        "{% if python_tools %}Python in <code>: {% for t in python_tools[:] %}{{ t | string }}{% endfor %}{% endif %}"
        "{% endif %}<|im_end|>\n{% for m in messages %}{% set text = m.content if m.content is string else '' %}"
        "{% if m.role == 'user' or m.role == 'tool' %}<|im_start|>user\n{{ text }}<|im_end|>\n"
        "{% elif m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
        "{{ '' if mode == '/think' else '<think>\n\n</think>\n' }}{{ text }}<|im_end|>\n"
        "{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '' if mode == '/think' else '<think>\n\n</think>\n' }}{% endif %}"
    ),
}  # fmt: skip
PAPERS = [{"text": "Ice is cold."}, {"doc_id": "b7", "text": "Fire is hot."}]
ADD = {"name": "add", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": ADD}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
ASSISTANT = "<|start_of_role|>assistant"


def kwargs(**given: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": given}


class Turn(NamedTuple):
    """A request, what its prompt has, what the model writes, and how that is read."""

    family: str
    fields: dict[str, Any]
    told: tuple[str, ...]
    writes: str = "Yes."
    thought: str | None = None
    content: str = "Yes."


WORDS, TAGS = (
    "Here is my thought process:\n\nHm, so.\n\nHere is my response:\n\nYes.",
    "<think>Hm, so.</think>\n<response>Yes.</response>",
)
TURNS = [
    Turn("3.1", {}, ("Help.", f"{ASSISTANT}<|end_of_role|>")),
    Turn("3.1", {"documents": PAPERS}, ("Documents.", "Ice is cold. Fire is hot.")),
    Turn("3.1", kwargs(documents=PAPERS, controls={"citations": True}),
         ("Cite by <co>", ASSISTANT + ' {"citations": true}'), "Yes <co>1</co>", None, "Yes <co>1</co>"),
    Turn("3.1", {"documents": PAPERS, "tools": TOOLS}, ("Tools, documents.", '"name": "add"', "Ice")),
    Turn("3.2", {}, ("Help.",)),
    Turn("3.2", kwargs(thinking=True), ("after 'Here is my thought process:'",), WORDS, "Hm, so."),
    Turn("3.2", {"thinking": {"type": "enabled"}}, ("after 'Here is my thought process:'",), WORDS, "Hm, so."),
    Turn("3.2", kwargs(thinking=True), ("Here is my",), "Here is my answer", None, "Here is my answer"),
    Turn("3.2", {"thinking": True, "tools": TOOLS}, ("Tools.",)),  # as an agent asks: the template decides
    Turn("3.3", {}, ("Help.",), "<response>Yes.</response>", None, "<response>Yes.</response>"),
    Turn("3.3", kwargs(thinking=True), ("between <think></think>",), TAGS, "Hm, so."),
    Turn("3.3", kwargs(thinking=True), ("between <think></think>",), "<think>Hm, so.</think>Yes.", "Hm, so."),
    Turn("3.3", kwargs(thinking=True, controls={"length": "short"}), (ASSISTANT + ' {"length": "short"}',),
         TAGS, "Hm, so."),
    Turn("3.3", kwargs(controls={"originality": "abstractive"}), (ASSISTANT + ' {"originality": "abstractive"}',)),
    Turn("3.3", {"documents": PAPERS}, ("document 1<|end_of_role|>Ice", "document b7<|end_of_role|>Fire")),
    Turn("3.3", {"documents": PAPERS, "messages": SYSTEM}, ("Be brief.", "document 1<|end_of_role|>Ice")),
    Turn("smollm3", {}, ("Mode: /think", "You are SmolLM.", "assistant\n"),
         "<think>\nHm, so.\n</think>\nYes.", "Hm, so."),
    Turn("smollm3", {"enable_thinking": False}, ("Mode: /no_think", "assistant\n<think>\n\n</think>\n")),
    Turn("smollm3", {"reasoning_effort": "none"}, ("Mode: /no_think",)),
    Turn("smollm3", {"messages": [{"role": "system", "content": "Be brief. /no_think"}]},
         ("Mode: /no_think", "Instructions: Be brief.\n")),
    Turn("smollm3", {"messages": [{"role": "developer", "content": "Be brief."}], "tools": TOOLS},
         ("Instructions: Be brief.\n", "'name': 'add'")),
    Turn("smollm3", {"messages": [{"role": "system", "content": "All. /system_override"}]}, ("system\nAll.",)),
    Turn("smollm3", kwargs(xml_tools=[ADD]), ("'name': 'add'",)),
    Turn("smollm3", kwargs(python_tools=["def f(): ..."]), ("Python in <code>: def f()",),
         "<think>Hm, so.</think><code>f()</code>", "Hm, so.", "<code>f()</code>"),
]  # fmt: skip


def ask(live: Live, fields: dict[str, Any]) -> Any:
    messages = [*fields.get("messages", ()), {"role": "user", "content": "Is it?"}]
    return live.http.post("/v1/chat/completions", json={"max_tokens": 400, **fields, "messages": messages})


@pytest.mark.parametrize("turn", TURNS)
def test_a_request_reaches_the_template_and_its_output_is_read(writer: Writer, turn: Turn) -> None:
    live = writer(TEMPLATES[turn.family], turn.writes)
    answer = ask(live, turn.fields)
    assert answer.status_code == 200, answer.text
    for words in turn.told:
        assert words in live.sent()
    message = answer.json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (turn.thought, turn.content)


BESIDE = kwargs(thinking=True)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("3.1", {"documents": ["Ice is cold."]}, "documents"),
    ("3.1", kwargs(documents=[{"title": "Ice"}]), "documents"),
    ("3.1", kwargs(xml_tools=[ADD]), "xml_tools"),
    *((family, {**BESIDE, **more}, "thinking")
      for family in ("3.2", "3.3") for more in ({"tools": TOOLS}, {"documents": PAPERS}, {"messages": SYSTEM})),
    ("smollm3", {"documents": PAPERS}, "documents"),
    ("smollm3", kwargs(controls={"length": "short"}), "controls"),
    ("smollm3", {"tools": TOOLS, **kwargs(xml_tools=[ADD])}, "xml_tools"),
    *(("smollm3", {"messages": [{"role": "system", "content": "All. /system_override"}], **more}, name)
      for name, more in (("tools", {"tools": TOOLS}), ("xml_tools", kwargs(xml_tools=[ADD])),
                         ("python_tools", kwargs(python_tools=["f"])))),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "name"), REFUSED)
def test_what_a_template_would_leave_out_is_refused_by_name(
    writer: Writer, family: str, fields: dict[str, Any], name: str
) -> None:
    answer = ask(writer(TEMPLATES[family], "Yes."), fields)
    assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(("family", "controls", "kept"), [
    ("3.3", {"citations": True}, True), ("3.3", {"length": "short"}, False), ("3.1", {"citations": True}, False)
])  # fmt: skip
def test_citations_in_special_tokens_stay_in_the_text(
    writer: Writer, family: str, controls: dict[str, Any], kept: bool
) -> None:
    live = writer(TEMPLATES[family], "Yes.")
    assert ask(live, {"documents": PAPERS, **kwargs(controls=controls)}).status_code == 200
    assert live.engine.submitted[-1].params.skip_special_tokens is not kept
