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
        made = cls(developer, shows("system", "user"), late, shows("user", "user"))
        if not shows("user", "calls", "tool"):
            return made
        after_result = shows("user", "calls", "tool", "user")
        return made._replace(after_result=after_result, several=shows("user", "calls", "tool", calls=2))


def _probe(at: int, role: str, calls: int) -> dict[str, Any]:
    """Return a message of a short conversation. role: `calls` is a message of the assistant with calls."""
    if role != "calls":
        return {"role": role, "content": f"probe{at}probe", "tool_call_id": "probe0000", "name": "f"}
    made = [
        {"id": f"probe000{n}", "type": "function", "function": {"name": "f", "arguments": {}}} for n in range(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


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
    made: list[dict[str, Any]] = []
    opening = True  # only instructions so far
    for message in messages if roles.several else _one_by_one(messages):
        new = dict(message)
        if new.get("role") == "developer" and not roles.developer:
            new["role"] = "system"
        if new.get("role") not in SYSTEM:
            opening = False
        elif made and opening and not roles.late:
            made[-1]["content"] = _joined(made[-1], new)
            continue
        elif not (roles.system if opening else roles.late):
            new["role"] = "user"
        after_result = bool(made) and (made[-1].get("role"), new.get("role")) == ("tool", "user")
        if made and ((_repeat(made[-1], new) and not roles.repeats) or (after_result and not roles.after_result)):
            made[-1]["content"] = _joined(made[-1], new)
        else:
            made.append(new)
    return made


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one call in each, followed by its result."""
    made: list[Message] = []
    waiting: list[Message] = []  # messages with one call each, whose results have not come
    for message in messages:
        calls = message.get("tool_calls") or ()
        found = [at for at, one in enumerate(waiting) if one["tool_calls"][0].get("id") == message.get("tool_call_id")]
        if message.get("role") == "tool" and found:
            made.append(waiting.pop(found[0]))
        elif len(calls) > 1:
            made += waiting
            waiting = [
                {**message, "content": message.get("content") if call is calls[0] else "", "tool_calls": [call]}
                for call in calls
            ]
            continue
        elif message.get("role") != "tool":
            made += waiting
            waiting = []
        made.append(message)
    return [*made, *waiting]


def _repeat(before: Message, new: Message) -> bool:
    role = new.get("role")
    calls = before.get("tool_calls") or new.get("tool_calls")
    return role == before.get("role") and role in ("user", "assistant") and not calls


def _joined(before: Message, new: Message) -> Any:
    """Return the content of two messages: a text, or a list of parts if one of them is a list."""
    contents = [message.get("content") or "" for message in (before, new)]
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if content)
    return [part for content in contents for part in (content if isinstance(content, list) else [_part(content)])]


def _part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}
