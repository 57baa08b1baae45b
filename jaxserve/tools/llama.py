"""Llama 3 and 4, GLM-4: a call is the whole output, as JSON or as Python, so its beginning must name a tool.

OLMo 3 writes calls as Python too, one in a line, between tags. An output of GLM-4 is a name, a line
break and JSON.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from jaxserve.tools.events import Call, Event, Markers, Parser, Schemas, call_of, loaded, written
from jaxserve.tools.marked import Marked
from jaxserve.tools.pattern import NAME, SPACE, WORD, Match, Pattern, character, either, many, maybe, sequence, text
from jaxserve.tools.scan import Cursor
from jaxserve.tools.streamed import HEAD, NONE, OPTIONAL_TYPE, CallStream, Form, Forms, json_form

TAG = "<|python_tag|>"
OLMO = Markers("<function_calls>", "</function_calls>")
JSON_NAMES = {"true": True, "false": False, "null": None}
_TAGGED = (SPACE, maybe(text(TAG)), SPACE)
FORMS = Forms(json_form(sequence(many(character(lambda char: char.isspace() or char == ";")), *_TAGGED), OPTIONAL_TYPE))
_JSON = Pattern((*_TAGGED, text("{"), SPACE, either(*(text(f'"{key}"') for key in ("name", "type", "function")))))
_GLM = (SPACE, NAME, text("\n"), SPACE)
_GLM_BEGINS = Pattern((*_GLM, text("{")))
_LETTER = character(lambda char: (char.isascii() and char.isalpha()) or char == "_")
_LIST = Pattern((*_TAGGED, text("["), SPACE, _LETTER, many(WORD), SPACE, text("(")))


class WholeOutput:
    """Reads an output that begins like a call as calls; any other is content."""

    def __init__(self, begins: Pattern, read: Callable[[Cursor], list[Call]], stream: CallStream) -> None:
        """Return a parser of one output.

        begins: matches the beginning of a call, of at most HEAD characters. stream: passes calls on before the
        end; `read` gets all text if it finds none, or what follows the last one.
        """
        self._begins, self._read, self._stream = Match(begins, HEAD), read, stream

    def feed(self, text: str) -> list[Event]:
        decided = self._begins.decided
        self._begins.read(text, 0)
        if not self._begins.failed:
            return self._stream.feed(text)
        text = text if decided else self._stream.rest + text
        return [Event("content", text)] if text else []

    def finish(self) -> list[Event]:
        left = None if self._begins.failed else self._stream.left()
        if left is None:
            return []
        calls = self._read(left) if self._begins.which is not None else []
        if calls:
            return [event for call in calls for event in call.events()]
        return [Event("content", left.text)] if left.text else []


def llama3_json(schemas: Schemas) -> Parser:
    """Return a parser of `{"name": ..., "parameters": {...}}`, several of them with a semicolon in between."""

    def read(rest: Cursor) -> list[Call]:
        calls = []
        rest.skip(";")
        rest.take(TAG)
        rest.skip(";")
        while not rest.done:
            call = call_of(_inner(rest.value()))
            if call is None or call.name not in schemas:
                return []
            calls.append(call)
            rest.skip(";")
        return calls

    return WholeOutput(_JSON, read, CallStream(FORMS, schemas))


def _glm_name(head: Cursor) -> str:
    head.skip()
    return head.word()


GLM_FORMS = Forms(Form(_GLM, _glm_name, False))


def glm4(schemas: Schemas) -> Parser:
    """Return a parser of one output, which is a call if it begins with the name of a tool."""
    return WholeOutput(_GLM_BEGINS, lambda rest: [], CallStream(GLM_FORMS, schemas, idle=Cursor.skip))


def pythonic(schemas: Schemas) -> Parser:
    """Return a parser of `[f(a=1), g(b="x")]`."""

    def read(rest: Cursor) -> list[Call]:
        rest.skip()
        rest.take(TAG)
        rest.skip()
        try:
            tree = ast.parse(rest.rest.rstrip(), mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                return []
            calls = [_python_call(element) for element in tree.elts]
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return []
        return calls if all(call.name in schemas for call in calls) else []

    return WholeOutput(_LIST, read, CallStream(NONE))


def olmo3(schemas: Schemas) -> Parser:
    """Return a parser of `f(a=1)` in lines of their own between tags."""

    def read(body: Cursor) -> list[Call] | None:
        try:
            lines = ast.parse(body.rest.strip(), mode="exec").body
            return [_python_call(line.value if isinstance(line, ast.Expr) else line) for line in lines] or None
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return None

    return Marked(OLMO, read)


class _Json(ast.NodeTransformer):
    """Replaces the names of JSON's values, which models write among Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def _inner(value: object) -> object:
    """Return the object in `function`, where the model wraps its calls as OpenAI does."""
    return value["function"] if isinstance(value, dict) and isinstance(value.get("function"), dict) else value


def _python_call(node: ast.AST) -> Call:
    """Return a call with keyword arguments that are literals. Raises ValueError or TypeError for another expression."""
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("not a call with keyword arguments")
    arguments = {str(word.arg): ast.literal_eval(_Json().visit(word.value)) for word in node.keywords}
    text = written(arguments)
    if loaded(text) is None:
        raise ValueError("not JSON")
    return Call(ast.unparse(node.func), text)
