"""Llama 3 and 4: a call is the whole output, as JSON or as Python, so its beginning must name a tool."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from jaxserve.tools.events import Call, Event, Parser, Schemas, call_of, loaded, written
from jaxserve.tools.scan import Scan
from jaxserve.tools.streamed import HEAD, CallStream, json_form

TAG = "<|python_tag|>"
FORM = json_form(r"[\s;]*(?:<\|python_tag\|>)?\s*", first=r'(?:"type"\s*:\s*"function"\s*,\s*)?')
_JSON = re.compile(r'(?:<\|python_tag\|>)?\s*\{\s*"(?:name|type|function)"')
_LIST = re.compile(r"(?:<\|python_tag\|>)?\s*\[\s*[A-Za-z_][\w.]*\s*\(")


class WholeOutput:
    """Reads an output that begins like a call as calls; any other is content."""

    def __init__(
        self,
        begins: Callable[[str], bool],
        may_begin: tuple[str, ...],
        read: Callable[[str], list[Call]],
        stream: CallStream,
    ) -> None:
        """Return a parser of one output.

        begins: whether the first HEAD characters begin a call. may_begin: what such text starts with. stream:
        passes calls on before the end; `read` gets all text if it finds none, or what follows the last one.
        """
        self._begins, self._may_begin, self._read, self._stream = begins, may_begin, read, stream
        self._seen = ""  # while undecided
        self._decided: bool | None = None  # None: unknown, True: calls, False: content

    def feed(self, text: str) -> list[Event]:
        if self._decided is False:
            return [Event("content", text)] if text else []
        if self._decided is None:
            self._seen = (self._seen + text)[:HEAD]
            start = self._seen.lstrip()
            if not any(start.startswith(mark[: len(start)]) for mark in self._may_begin):
                self._decided = False
        events = self._stream.feed(text) if self._decided is not False else []
        if self._decided is None and self._stream.called:
            self._decided = True
        elif self._decided is None and len(self._seen) == HEAD:
            self._decided = self._begins(self._seen)
            text = ""
        if self._decided is False:
            return self._released() + ([Event("content", text)] if text else [])
        return events

    def finish(self) -> list[Event]:
        if self._decided is False:
            return []
        text, called = self._stream.rest, self._stream.called
        if called and not self._stream.matters:
            return []
        calls = self._read(text.strip(" \n;")) if called or self._begins(text[:HEAD]) else []
        return [event for call in calls for event in call.events()] if calls else self._released()

    def _released(self) -> list[Event]:
        text = self._stream.rest
        return [Event("content", text)] if text else []


def llama3_json(schemas: Schemas) -> Parser:
    """Return a parser of `{"name": ..., "parameters": {...}}`, several of them with a semicolon in between."""

    def read(text: str) -> list[Call]:
        calls = []
        for one in _objects(text.removeprefix(TAG).strip()):
            found = call_of(_inner(loaded(one)))
            if found is None or found.name not in schemas:
                return []
            calls.append(found)
        return calls

    stream = CallStream((FORM,), schemas)
    return WholeOutput(lambda text: _JSON.match(text.lstrip()) is not None, ("{", TAG), read, stream)


def pythonic(schemas: Schemas) -> Parser:
    """Return a parser of `[f(a=1), g(b="x")]`."""

    def read(text: str) -> list[Call]:
        try:
            tree = ast.parse(text.removeprefix(TAG).strip(), mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                return []
            calls = [_python_call(one) for one in tree.elts]
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return []
        return calls if all(call.name in schemas for call in calls) else []

    return WholeOutput(lambda text: _LIST.match(text.lstrip()) is not None, ("[", TAG), read, CallStream(()))


def _inner(found: object) -> object:
    """Return the object in `function`, where the model wraps its calls as OpenAI does."""
    return found["function"] if isinstance(found, dict) and isinstance(found.get("function"), dict) else found


def _objects(text: str) -> list[str]:
    """Split JSON objects, between which semicolons may stand."""
    parts, scan, at = list[str](), Scan(), 0
    while at < len(text):
        begun, at = at, scan.to_depth(text, 0, at)
        if part := text[begun:at].strip("; \t\r\n"):
            parts.append(part)
    return parts


def _python_call(node: ast.expr) -> Call:
    """Return a call with keyword arguments that are literals. Raises ValueError or TypeError for another expression."""
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("not a call with keyword arguments")
    arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    text = written(arguments)
    if loaded(text) is None:
        raise ValueError("not JSON")
    return Call(ast.unparse(node.func), text)
