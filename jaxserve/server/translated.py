"""What APIs that are translated to chat share: fields of their own in its errors, and checks of their parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.server.failures import wrong
from jaxserve.server.openai import Drawn


@contextmanager
def renamed_fields(names: Mapping[str, str], tools: Sequence[str] = ()) -> Iterator[None]:
    """Name the fields of another API in the errors of a chat request.

    names: expressions of the beginnings of chat's fields, and what replaces them. The first that matches counts.
    tools: where each tool of chat is in the body, as some of its tools are ignored or in groups.
    """
    try:
        yield
    except InvalidValue as error:
        field = error.param or ""
        for chat, own in names.items():
            if match := re.match(rf"(?:{chat})(?![^.\[])", field):
                new = match.expand(own) + field[match.end() :]
                new = re.sub(r"^tools\[(\d+)\]", lambda at: tools[int(at[1])] if tools else at[0], new)
                message = re.sub(rf"(?<![\w.]){re.escape(field)}(?!\w)", lambda _, new=new: new, str(error))  # type: ignore[misc]
                error.args, error.param = (message,), new  # in place: its class stays
                break
        raise


def shared_fields(body: Drawn) -> dict[str, Any]:
    """Return the fields that a body of another API shares with chat, those that are set."""
    return {name: getattr(body, name) for name in Drawn.model_fields if name in body.model_fields_set}


def chunked(streams: bool | None) -> dict[str, Any]:
    """Return the fields of a chat request that is read in chunks. streams: by its client, as they come."""
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    return fields if streams else {**fields, "pace_tokens": False}


def text_of(part: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text field of an object. Raises InvalidValue that names the field."""
    value = part.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", value, "must be a text")
    return value


def object_of(value: Any, where: str) -> dict[str, Any]:
    """Return a value that must be an object. Raises InvalidValue that names the field."""
    if not isinstance(value, dict):
        raise wrong(where, value, "must be an object")
    return value


def objects_in(given: Sequence[Any], where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects of a list, each with its place. Raises InvalidValue that names the place of another value."""
    for at, value in enumerate(given):
        yield object_of(value, f"{where}[{at}]"), f"{where}[{at}]"
