"""Strict conversion of YAML to dataclasses: errors name file, line, value and what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from jaxserve.errors import InvalidValue

T = TypeVar("T")

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = r"\s*([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"


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


def size(text: str | int) -> int:
    """Parse bytes: a number, or a string with a unit: `512MiB`, `2GiB`, `1.5G`."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(_NUMBER + r"([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise InvalidValue(f"{text!r} must be a number of bytes, or have a unit as in 512MiB, 2GiB or 1.5G")
    number, unit = match.groups()
    return int(float(number) * _BYTES[(unit or "").lower()])


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return a hint for an unknown word: the closest allowed one, and all of them if they are few."""
    names = sorted(allowed)
    close = difflib.get_close_matches(word[:100], names, n=1)  # bounded: clients may send long words
    if close and len(names) > 12:
        return f"did you mean {close[0]!r}?"
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(names)}"


def load_yaml(path: str | Path, cls: type[T]) -> T:
    """Read a YAML file as the dataclass `cls`.

    Keys are field names (`-` and `_` are equal). Field types may be int, float, bool, str, Path, None,
    Literal, Enum, dataclasses, tuples, lists, mappings, and unions of these. A float may have a unit
    of time (`8s` is 8.0, `50ms` is 0.05). Unknown keys, wrong types and repeated keys are errors.

    Raises InvalidValue with file and line, also for errors from `__post_init__`, and
    FileNotFoundError for a missing file.
    """
    return parse_yaml(Path(path).read_text(encoding="utf-8"), cls, str(path))


def parse_yaml(text: str, cls: type[T], source: str = "<yaml>") -> T:
    """Parse YAML text like `load_yaml`; `source` names it in errors."""
    node = _compose(text, source)
    built: T = _build(cls, {}, source) if node is None else _Reader(source).value(node, cls, "")
    return built


def load_fields(path: str | Path, cls: type[Any]) -> dict[str, Any]:
    """Read the fields of dataclass `cls` from a YAML file without building it.

    Defaults and flags can then be merged below and above them. As strict as `load_yaml`.
    """
    node = _compose(Path(path).read_text(encoding="utf-8"), str(path))
    return {} if node is None else _Reader(str(path)).fields(node, cls, "")


def convert(value: Any, hint: Any) -> Any:
    """Convert a plain value, or the string of a flag, to type `hint`. Raises InvalidValue."""
    return _convert_scalar(value, hint)


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
        if dataclasses.is_dataclass(hint):
            return _build(hint, self.fields(node, hint, name), self.at(node))
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated and not callable(args[1]):
            return self.value(node, args[0], name)
        if origin in (Union, types.UnionType):
            return self.union(node, args, name)
        if origin in (tuple, list, Sequence) or (origin is not None and _is(origin, Sequence)):
            return self.sequence(node, origin, args, name)
        if _is(origin or hint, Mapping):
            return self.mapping(node, args or (str, Any), name)
        plain = self.plain.construct_object(node, deep=True)
        try:
            return _convert_scalar(plain, hint)
        except InvalidValue as error:
            raise InvalidValue(f"{self.at(node)}: {name or 'value'}: {error}", name) from error

    def union(self, node: yaml.Node, options: tuple[Any, ...], name: str) -> Any:
        if types.NoneType in options and isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            return None
        problems: list[InvalidValue] = []
        for option in options:
            if option is types.NoneType:
                continue
            try:
                return self.value(node, option, name)
            except InvalidValue as error:
                problems.append(error)
        if len(problems) == 1:
            raise problems[0]
        raise InvalidValue(f"{self.at(node)}: {name}: fits none of {', '.join(map(_name, options))}", name)

    def sequence(self, node: yaml.Node, origin: Any, args: tuple[Any, ...], name: str) -> Any:
        if not isinstance(node, yaml.SequenceNode):
            raise InvalidValue(f"{self.at(node)}: {name} must be a list", name)
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(args) != len(node.value):
                raise InvalidValue(
                    f"{self.at(node)}: {name} has {len(node.value)} entries and must have {len(args)}", name
                )
            return tuple(
                self.value(child, hint, f"{name}[{i}]")
                for i, (child, hint) in enumerate(zip(node.value, args, strict=True))
            )
        item = args[0] if args else Any
        items = [self.value(child, item, f"{name}[{i}]") for i, child in enumerate(node.value)]
        return items if origin is list else tuple(items)

    def mapping(self, node: yaml.Node, args: tuple[Any, ...], name: str) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, _, child in self.items(node, name):
            made[_convert_scalar(key, args[0])] = self.value(child, args[1], f"{name}.{key}" if name else str(key))
        return made

    def fields(self, node: yaml.Node, cls: Any, name: str) -> dict[str, Any]:
        hints = typing.get_type_hints(cls, include_extras=True)
        allowed = {f.name for f in dataclasses.fields(cls) if f.init}
        made: dict[str, Any] = {}
        for _, key_node, child in self.items(node, name):
            key = str(key_node.value)  # as written: YAML reads `on` as a boolean
            field = key.replace("-", "_")
            if field not in allowed:
                inside = f" in {name}" if name else ""
                raise InvalidValue(f"{self.at(key_node)}: unknown key {key!r}{inside}; {nearest(field, allowed)}", key)
            if field in made:
                raise InvalidValue(f"{self.at(key_node)}: key {key!r} is given twice", key)
            made[field] = self.value(child, hints[field], f"{name}.{field}" if name else field)
        return made

    def items(self, node: yaml.Node, name: str) -> list[tuple[Any, yaml.Node, yaml.Node]]:
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            return []
        if not isinstance(node, yaml.MappingNode):
            raise InvalidValue(f"{self.at(node)}: {name or 'the file'} must be a mapping of keys to values", name)
        made: dict[Any, tuple[Any, yaml.Node, yaml.Node]] = {}
        for key_node, child in node.value:
            key = self.plain.construct_object(key_node, deep=True)
            if key in made:
                raise InvalidValue(f"{self.at(key_node)}: key {key!r} is given twice", str(key))
            made[key] = (key, key_node, child)
        return list(made.values())


def _is(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base) and kind not in (str, bytes)


def _name(hint: Any) -> str:
    return "nothing" if hint is types.NoneType else getattr(hint, "__name__", str(hint))


def _convert_scalar(value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Annotated:
        return args[1](value) if callable(args[1]) else _convert_scalar(value, args[0])
    if origin is Literal:
        if value in args:
            return value
        raise InvalidValue(f"{value!r} must be one of {', '.join(map(repr, args))}")
    if origin in (Union, types.UnionType):
        return None if value is None else _convert_scalar(value, next(a for a in args if a is not types.NoneType))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        names = {member.value: member for member in hint}
        if value in names:
            return names[value]
        raise InvalidValue(f"{value!r} must be one of {', '.join(map(repr, names))}")
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
            return int(value)
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return seconds(value)
    if hint is str and isinstance(value, str):
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
    raise InvalidValue(f"{value!r} must be {expected.get(hint, _name(hint))}")
