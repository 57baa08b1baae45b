"""Roles of messages as a chat template takes them: clients send any order, and many templates refuse or drop some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Message = Mapping[str, Any]
SYSTEM = ("system", "developer")


class Roles(NamedTuple):
    """What a chat template does with roles."""

    developer: bool  # it knows the role
    system: bool  # it takes a system message, as the first one
    late: bool  # it takes further ones, anywhere
    repeats: bool  # it takes two messages of the user in a row
    after_result: bool = True  # it takes a message of the user after the result of a call
    several: bool = True  # it takes two calls in one message

    @classmethod
    def of(cls, render: Callable[[list[dict[str, Any]]], str], text: str) -> Roles:
        """Find out by rendering short conversations. text: of the template."""

        def shows(*roles: str, calls: int = 1) -> bool:
            probe = [_probe(at, role, calls) for at, role in enumerate(roles)]
            try:
                prompt = render(probe)
            except Exception:  # a template is a program that may raise anything
                return False
            return all(message["content"] in prompt for message in probe)

        late = shows("system", "user", "assistant", "system", "user") and shows("system", "user", "system")
        # Many templates write any role as a header, though their models were trained with few of them.
        developer = "developer" in text and shows("developer", "user")
        basic = cls(developer, shows("system", "user"), late, shows("user", "user"))
        if not shows("user", "calls", "tool"):
            return basic
        after_result = shows("user", "calls", "tool", "user")
        return basic._replace(after_result=after_result, several=shows("user", "calls", "tool", calls=2))


def _probe(at: int, role: str, calls: int) -> dict[str, Any]:
    """Return a message of a short conversation. role: `calls` is a message of the assistant with calls."""
    if role != "calls":
        return {"role": role, "content": f"probe{at}probe", "tool_call_id": "probe0000", "name": "f"}
    renders = [
        {"id": f"probe000{n}", "type": "function", "function": {"name": "f", "arguments": {}}} for n in range(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": renders}


def unusual(messages: Sequence[Message]) -> bool:
    """Return whether a template may refuse or drop one of these messages for its role."""
    roles = [message.get("role") for message in messages]
    repeated = any(role == after and role in ("user", "assistant") for role, after in pairwise(roles))
    return repeated or any(role in SYSTEM or role == "tool" for role in roles)


def fitted(messages: Sequence[Message], roles: Roles) -> list[dict[str, Any]]:
    """Return the messages with roles that the template takes, and all of their texts in their order.

    Instructions at the beginning are joined. Later ones become messages of the user where they stand, if they
    must: before the others they would change the beginning of the prompt, and no cached prefix would fit.
    """
    fitting: list[dict[str, Any]] = []
    contents: list[list[Any]] = []  # of each; joined at the end, as there may be many
    opening = True  # only instructions so far
    for message in messages if roles.several else _one_by_one(messages):
        new = dict(message)
        if new.get("role") == "developer" and not roles.developer:
            new["role"] = "system"
        joins = False
        if new.get("role") not in SYSTEM:
            opening = False
        elif fitting and opening and not roles.late:
            joins = True
        elif not (roles.system if opening else roles.late):
            new["role"] = "user"
        if joins or (fitting and _joins(fitting[-1], new, roles)):
            contents[-1].append(new.get("content"))
        else:
            fitting.append(new)
            contents.append([new.get("content")])
    for entry, parts in zip(fitting, contents, strict=True):
        if len(parts) > 1:
            entry["content"] = _joined(parts)
    return fitting


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one call in each, followed by its result."""
    ordered: list[Message] = []
    waiting: dict[str, list[Message]] = {}  # messages with one call each, whose results have not come, by its id
    for message in messages:
        calls = message.get("tool_calls") or []
        if message.get("role") == "tool":
            if queue := waiting.get(str(message.get("tool_call_id"))):
                ordered.append(queue.pop(0))
        else:
            ordered += [left for pending in waiting.values() for left in pending]
            waiting = {}
        if len(calls) < 2:
            ordered.append(message)
            continue
        for at, call in enumerate(calls):
            single = {**message, "content": "" if at else message.get("content"), "tool_calls": [call]}
            waiting.setdefault(str(call.get("id")), []).append(single)
    return [*ordered, *(left for pending in waiting.values() for left in pending)]


def _joins(before: Message, new: Message, roles: Roles) -> bool:
    """Return whether a template takes two messages only as one."""
    first, role = before.get("role"), new.get("role")
    if (first, role) == ("tool", "user"):
        return not roles.after_result
    calls = before.get("tool_calls") or new.get("tool_calls")
    return not roles.repeats and first == role and role in ("user", "assistant") and not calls


def _joined(contents: Sequence[Any]) -> Any:
    """Return the content of several messages: a text, or a list of parts if one of them is a list."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return "\n\n".join(given)
    return [
        part
        for content in given
        for part in (content if isinstance(content, list) else [{"type": "text", "text": content}])
    ]
