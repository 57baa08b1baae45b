"""Variables of chat templates with content of their own: a template that leaves one out would not say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidValue, short
from jaxserve.tools.native import Form
from jaxserve.tools.prompt import Message, knows

FIELD = "chat_template_kwargs"
CONTENT = ("documents", "controls", "xml_tools", "python_tools")  # of Granite 3 and SmolLM3
OVERRIDE = "/system_override"  # in a system message of SmolLM3: it is the whole of the instructions
CITE = "<|start_of_cite|>"  # of Granite 3.3, a special token


def variables_of(
    template: str,
    form: Form | None,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the variables of a request for its template. Raises InvalidValue for what the template would leave out.

    form: of the template, for families that read tools in their own way.
    """
    variables = dict(given)
    for name in CONTENT:
        if variables.get(name) and not knows(template, name):
            field = name if name == "documents" else FIELD
            raise InvalidValue(f"the chat template of this model knows no {name}: leave them out", field)
    if variables.get("documents"):
        variables["documents"] = _documents(variables["documents"], "doc_id" in template)
    instructions = messages[0].get("content") if messages and messages[0].get("role") == "system" else None
    if form is not None and form.tools and tools:
        if variables.get(form.tools):
            raise InvalidValue(f"{FIELD}.{form.tools} and tools are the same here: give one of them", FIELD)
        variables[form.tools] = list(tools)
    if OVERRIDE in template and OVERRIDE in str(instructions):
        for name in ("tools", "xml_tools", "python_tools"):
            if tools if name == "tools" else variables.get(name):
                raise InvalidValue(f"the chat template leaves {name} out beside {OVERRIDE}: give one of them", name)
    if form is not None and "elif thinking" in template and _named(variables):
        beside = {"a system message": instructions, "tools": tools, "documents": variables.get("documents")}
        if others := [name for name, value in beside.items() if value]:
            what = f"the chat template of this model leaves thinking out beside {others[0]}: give one of them"
            raise InvalidValue(what, FIELD)
    return variables


def cites(template: str, given: Mapping[str, Any]) -> bool:
    """Return whether answers have citations in special tokens, which the text must keep."""
    controls = given.get("controls")
    return CITE in template and isinstance(controls, dict) and "citations" in controls


def _named(variables: Mapping[str, Any]) -> bool:
    """Return whether a request asks for Granite's own variable.

    Fields of all families set both variables. Agents send them with every request, and do without the thinking.
    """
    return bool(variables.get("thinking")) and "enable_thinking" not in variables


def _documents(given: Any, numbered: bool) -> list[dict[str, Any]]:
    """Return the documents of a request. numbered: the template reads a `doc_id` of each."""
    if not isinstance(given, list) or not all(
        isinstance(document, dict) and isinstance(document.get("text"), str) for document in given
    ):
        raise InvalidValue(f"documents={short(given)} must be a list of objects with a text, `text`", "documents")
    return [{**({"doc_id": str(number)} if numbered else {}), **document} for number, document in enumerate(given, 1)]
