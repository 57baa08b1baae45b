"""Conversations for templates that know tools, but not OpenAI's fields for them: each gets its own form.

Without it such a template leaves tools, calls or results out of the prompt, and says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.tools.json_calls import HERMES, PHI
from jaxserve.tools.prompt import Message, object_of

Functions = Sequence[Mapping[str, Any]]  # the name and the arguments of each call
Writer = Callable[[Mapping[str, Any], Functions], list[dict[str, Any]]]  # of a message with calls


class Form(NamedTuple):
    """What a template reads instead of `tool_calls` and the role `tool`."""

    fits: Callable[[str], bool]  # the text of a template
    calls: Writer
    result: str  # the role of a result
    tools: str = ""  # a variable of the template for the tools
    system: str = ""  # a key of the system message for the tools


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _said(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(message)] if message.get("content") else []


def _behind(opening: str, closing: str = "") -> Writer:
    """Write a JSON list behind the text of the message."""
    return lambda message, calls: [
        {**message, "content": f"{message.get('content') or ''}{opening}{_dumps(list(calls))}{closing}"}
    ]


def _tagged(message: Mapping[str, Any], calls: Functions) -> list[dict[str, Any]]:
    texts = [f"{HERMES.opening}\n{_dumps(call)}\n{HERMES.closing}" for call in calls]
    return [{**message, "content": "\n".join([*([message["content"]] if message.get("content") else ()), *texts])}]


def _with_role(message: Mapping[str, Any], calls: Functions) -> list[dict[str, Any]]:
    return [*_said(message), {"role": "assistant_tool_call", "content": _dumps(list(calls))}]


def _with_metadata(message: Mapping[str, Any], calls: Functions) -> list[dict[str, Any]]:
    each = [{"role": "assistant", "metadata": call["name"], "content": _dumps(call["arguments"])} for call in calls]
    return [*_said(message), *each]


# As the published templates have it. The first that fits is taken.
FORMS = (
    Form(lambda text: "assistant_tool_call" in text, _with_role, "tool_response"),  # Granite 3.0
    Form(lambda text: "<|start_of_role|>" in text, _behind(PHI.opening), "tool_response"),  # Granite 3.1 and later
    Form(lambda text: "message['tools']" in text, _behind(*PHI), "tool_response", system="tools"),  # Phi-4-mini
    Form(lambda text: "metadata" in text and "observation" in text, _with_metadata, "observation"),  # GLM-4
    Form(lambda text: "xml_tools" in text, _tagged, "tool", tools="xml_tools"),  # SmolLM3
)


def form_of(template: str) -> Form | None:
    """Return the form of a template; None: it reads OpenAI's fields."""
    return None if "tool_calls" in template else next((form for form in FORMS if form.fits(template)), None)


def in_form(form: Form, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with calls, results and tools where a template reads them."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            written.append({"role": form.result, "content": message.get("content") or ""})
            continue
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        functions = [object_of(call["function"]) for call in message.get("tool_calls") or ()]
        written += form.calls(plain, functions) if functions else [plain]
    if tools and form.system:
        if not written or written[0].get("role") != "system":
            written.insert(0, {"role": "system", "content": ""})
        written[0][form.system] = _dumps([tool.get("function", tool) for tool in tools])
    return written
