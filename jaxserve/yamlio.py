"""Typed values from text and YAML: errors name file, line, value and what is allowed.

A type says what is allowed: a `Literal` its choices, `Annotated[int, Range(1)]` its range, and a function in
`Annotated[int, size]` how it is parsed. Converting parses and checks choices; `check_fields` checks both.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union

import yaml

from jaxserve.errors import InvalidValue

T = TypeVar("T")

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = r"\s*([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_NULL = "tag:yaml.org,2002:null"
_UNIONS = (Union, UnionType)


@dataclasses.dataclass(frozen=True)
class Range:
    """The least and the largest value of a number, in the annotation of its type. None: no upper limit."""

    least: float
    most: float | None = None

    def allows(self, value: float) -> bool:
        return self.least <= value and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"


class AboveZero(Range):
    """The range of a time that cannot be zero."""

    def __init__(self) -> None:
        super().__init__(0)

    def allows(self, value: float) -> bool:
        return value > 0

    def __str__(self) -> str:
        return "a positive time, as in 50ms"


def seconds(text: str | float) -> float:
    """Parse seconds: a number, or a string with a unit: `8s`, `50ms`, `250us`, `2m`, `1h`; or `inf`."""
    if isinstance(text, int | float):
        return float(text)
    match = re.fullmatch(_NUMBER + r"(us|µs|ms|s|m|min|h)?\s*", text)
    if match is None:
        if text.strip().lower() in ("inf", ".inf"):
            return float("inf")
        raise InvalidValue(f"{text!r} must be a number of seconds, or have a unit as in 8s, 50ms or 2m")
    number, unit = match.groups()
    return float(number) * _SECONDS[unit or "s"]


def size(text: str | float) -> int:
    """Parse bytes: a number, or a string with a unit: `512MiB`, `2GiB`, `1.5G`."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(_NUMBER + r"([kmgt]i?)?b?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise InvalidValue(f"{text!r} must be a number of bytes, or have a unit as in 512MiB, 2GiB or 1.5G")
    number, unit = match.groups()
    return int(float(number) * _BYTES[(unit or "").lower()])


Count = Annotated[int, Range(1)]
Bytes = Annotated[int, size, Range(0)]
Room = Annotated[int, size, Range(1)]  # bytes without which nothing works
Seconds = Annotated[float, seconds, Range(0)]
Positive = Annotated[float, seconds, AboveZero()]  # seconds


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return a hint for an unknown word: the closest allowed one, and all of them if they are few."""
    names = sorted(allowed)
    close = difflib.get_close_matches(word[:100], names, n=1)  # bounded: clients may send long words
    if close and len(names) > 12:
        return f"did you mean {close[0]!r}?"
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(names)}"


def text_of(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises InvalidValue, and FileNotFoundError for a missing file."""
    try:
        return path.read_text(encoding="utf-8-sig")  # a template with a mark of its encoding would put it into prompts
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path}: byte {error.start} is not UTF-8: save the file in that encoding") from error


def seed_of(text: str) -> int:
    """Return the seed that a command line names. Raises argparse's error."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def load_yaml(path: str | Path, cls: type[T]) -> T:
    """Read a YAML file as the dataclass `cls`.

    Keys are field names (`-` and `_` are equal). Field types may be int, float, bool, str, None,
    Literal, dataclasses, tuples of one type, mappings, and unions of these. A float may have a unit
    of time (`8s` is 8.0, `50ms` is 0.05). Unknown keys, wrong types and repeated keys are errors.

    Raises InvalidValue with file and line, also for errors from `__post_init__`, and
    FileNotFoundError for a missing file.
    """
    return parse_yaml(text_of(Path(path)), cls, str(path))


def parse_yaml(text: str, cls: type[T], source: str = "<yaml>") -> T:
    """Parse YAML text like `load_yaml`; `source` names it in errors."""
    node = _compose(text, source)
    built: T = _build(cls, {}, source) if node is None else _Reader(source).value(node, cls, "")
    return built


def parse_setting(given: str | Mapping[str, Any], cls: type[T], name: str) -> T:
    """Parse the setting `name`: JSON, as on a command line, or a mapping. Raises InvalidValue for that setting."""
    try:
        return parse_yaml(given if isinstance(given, str) else json.dumps(dict(given)), cls, name)
    except InvalidValue as error:
        raise InvalidValue(str(error), name) from error


def load_fields(path: str | Path, cls: type[Any]) -> dict[str, Any]:
    """Read the fields of dataclass `cls` from a YAML file without building it.

    Defaults and flags can then be merged below and above them. As strict as `load_yaml`.
    """
    node = _compose(text_of(Path(path)), str(path))
    return {} if node is None else _Reader(str(path)).fields(node, cls, "")


def hints_of(cls: Any) -> dict[str, Any]:
    """Return the types of the fields of a class, with their annotations."""
    return _hints(cls)


_hints = cache(partial(typing.get_type_hints, include_extras=True))


def parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without None and annotations, and its annotations."""
    if typing.get_origin(hint) in _UNIONS:
        options = [option for option in typing.get_args(hint) if option is not NoneType]
        hint = options[0] if len(options) == 1 else hint
    return (hint.__origin__, hint.__metadata__) if typing.get_origin(hint) is Annotated else (hint, ())


def choices(hint: Any) -> tuple[Any, ...]:
    """Return the choices of a Literal or an optional Literal; () for other types."""
    kind, _ = parts(hint)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def parser_of(hint: Any) -> Callable[[Any], Any] | None:
    """Return the function that parses a type, if it is annotated with one."""
    return next(filter(callable, parts(hint)[1]), None)


def check_fields(settings: Any, param: str | None = None) -> None:
    """Check the fields of a dataclass against the choices and ranges of their types.

    Raises InvalidValue about `param`, the setting that they are part of; None: about the field.
    """
    for name, hint in hints_of(type(settings)).items():
        value, allowed = getattr(settings, name), choices(hint)
        if value is None and _optional(hint):
            continue
        if allowed and value not in allowed:
            raise InvalidValue(f"{name}={value!r} must be one of {', '.join(map(str, allowed))}", param or name)
        for bounds in parts(hint)[1]:
            if isinstance(bounds, Range) and not bounds.allows(value):
                raise InvalidValue(f"{name}={value!r} must be {bounds}", param or name)


def convert(value: Any, hint: Any) -> Any:
    """Convert a plain value, or the string of a flag, to type `hint`. Raises InvalidValue."""
    kind, parse, allowed = parts(hint)[0], parser_of(hint), choices(hint)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is Any or (value is None and _optional(hint)):
        return value
    if parse is not None:
        if number or isinstance(value, str):
            return parse(value)
        raise InvalidValue(f"{value!r} must be a number, or a string with a unit")
    if allowed:
        if value in allowed:
            return value
        raise InvalidValue(f"{value!r} must be one of {', '.join(map(repr, allowed))}")
    if kind is float and (number or isinstance(value, str)):
        return seconds(value)
    if kind is int and isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    if type(value) is kind:
        return value
    raise InvalidValue(f"{value!r} must be {_EXPECTED.get(kind, _name(kind))}")


def _optional(hint: Any) -> bool:
    return NoneType in typing.get_args(hint)


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InvalidValue(f"{source} is not valid YAML: {error}") from error


def _build(cls: Any, fields: Mapping[str, Any], where: str) -> Any:
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.init
        and f.name not in fields
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InvalidValue(f"{where}: missing {', '.join(map(repr, missing))}, which {cls.__name__} needs", missing[0])
    try:
        return cls(**fields)
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error}", error.param) from error


class _Reader:
    """Converts YAML nodes to a type; keeps the nodes, so that every error has a line."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.plain = yaml.SafeLoader("")

    def at(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, hint: Any, name: str) -> Any:
        """Convert `node` to `hint`; `name` is its dotted path in the file."""
        if node.tag == _NULL and _optional(hint):
            return None
        kind, _ = parts(hint)
        if dataclasses.is_dataclass(kind):
            return _build(kind, self.fields(node, kind, name), self.at(node))
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin in _UNIONS and parser_of(hint) is None:
            return self.union(node, args, name)
        if origin is tuple:
            return self.sequence(node, args[0], name)
        if origin is Mapping:
            entries = self.items(node, name, lambda key: self.value(key, args[0], name))
            return {key: self.value(child, args[1], f"{name}.{key}".lstrip(".")) for key, (_, child) in entries.items()}
        try:
            return convert(self.plain.construct_object(node, deep=True), hint)
        except InvalidValue as error:
            raise InvalidValue(f"{self.at(node)}: {name or 'value'}: {error}", name) from error

    def union(self, node: yaml.Node, options: tuple[Any, ...], name: str) -> Any:
        for option in options:
            try:
                return self.value(node, option, name)
            except InvalidValue:
                continue
        raise InvalidValue(f"{self.at(node)}: {name}: fits none of {', '.join(map(_name, options))}", name)

    def sequence(self, node: yaml.Node, item: Any, name: str) -> tuple[Any, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise InvalidValue(f"{self.at(node)}: {name} must be a list", name)
        return tuple(self.value(child, item, f"{name}[{i}]") for i, child in enumerate(node.value))

    def fields(self, node: yaml.Node, cls: Any, name: str) -> dict[str, Any]:
        hints, values = hints_of(cls), {}
        allowed = {f.name for f in dataclasses.fields(cls) if f.init}
        # Keys as written: YAML reads `on` as a boolean.
        for field, (key, child) in self.items(node, name, lambda key: str(key.value).replace("-", "_")).items():
            if field not in allowed:
                inside = f" in {name}" if name else ""
                unknown = f"unknown key {key.value!r}{inside}; {nearest(field, allowed)}"
                raise InvalidValue(f"{self.at(key)}: {unknown}", str(key.value))
            values[field] = self.value(child, hints[field], f"{name}.{field}".lstrip("."))
        return values

    def items(
        self, node: yaml.Node, name: str, named: Callable[[yaml.Node], str]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return the nodes of keys and values by the names of the keys."""
        if node.tag == _NULL:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise InvalidValue(f"{self.at(node)}: {name or 'the file'} must be a mapping of keys to values", name)
        entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, child in node.value:
            if named(key) in entries:
                raise InvalidValue(f"{self.at(key)}: key {key.value!r} is given twice", str(key.value))
            entries[named(key)] = key, child
        return entries
